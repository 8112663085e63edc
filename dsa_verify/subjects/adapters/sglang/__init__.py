"""Subjects that run SGLang's own published code. This table names them; importing it imports none of that code."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from dsa_verify.systems.engines import EngineSubject

_PACKAGE: Final = "dsa_verify.subjects.adapters.sglang"
# Slots of such pages of 4 tokens or more pass 2**24, from where on float32 does not hold every integer.
_HIGH_PAGE: Final = 1 << 22
_ONLY_GPU: Final = {"needs_gpu": True}
# On a GPU with the indexer, whose schedules and plans nobody builds on a CPU.
_BASIC: Final = {"presets": ("deepseek_v32_indexer", "tiny")}
_RAGGED: Final = "its ragged form is made anew for a batch and for token totals that are 1 or divisible by 16"
_PADDING: Final = "kernels of its padding are made anew for values of a batch, 26 in 272 replays on an H200"
# Fields of the geometry that the code asks for.
_INDEXER: Final = {"indexer": True}
_TWO_RANKS: Final = {"dcp_size": 2}
# Floors are of each request or of none: 0.5.22 has none, so a run that wants them says request_floors=true.
_V4: Final = {"presets": ("deepseek_v4", "small_v4"), "request_floors": False}


def _subjects(system: str, **rows: tuple[str, str, Mapping[str, Any]]) -> dict[str, EngineSubject]:
    """Return the subjects of `system`, by name. A row has the place (module of this package and attribute), the
    summary, and what else an EngineSubject has or the code asks of the geometry."""
    found = {}
    for name, (place, summary, rest) in rows.items():
        said = {key: value for key, value in rest.items() if key in ("needs_gpu", "presets", "compiles")}
        found[name] = EngineSubject(
            name=f"sglang:{name}",
            system=system,
            reference=f"{_PACKAGE}.{place}",
            summary=summary,
            settings=MappingProxyType({key: value for key, value in rest.items() if key not in said}),
            **said,
        )
    return found


# By the name after the colon.
SUBJECTS: Final[Mapping[str, EngineSubject]] = MappingProxyType(
    _subjects(
        "decode",
        decode=("basic:Decode", "the fused decode kernels, and what follows them", _BASIC),
        decode_backend=("backend:DecodeBackend", "the whole attention backend through its graph hooks", _INDEXER),
    )
    | _subjects(
        "target_verify",
        target_verify=("basic:TargetVerify", "the fused verify kernels, likewise", _BASIC),
        target_verify_backend=("backend:TargetVerifyBackend", "the whole attention backend, likewise", _INDEXER),
    )
    | _subjects(
        "draft_extend",
        draft_extend=("basic:DraftExtend", "the fused draft-extend kernels, likewise", {**_BASIC, "compiles": _RAGGED}),
        draft_extend_backend=("backend:DraftExtendBackend", "the whole attention backend, likewise", _INDEXER),
    )
    | _subjects(
        "mtp",
        mtp=(
            "mtp:Mtp",
            "one record, the fused copies to one and to three draft steps, and what follows them",
            {**_ONLY_GPU, **_INDEXER},
        ),
        mtp_sibling=(
            "mtp:Sibling",
            "draft step 0 refreshed from the record, the others copied from it",
            {**_ONLY_GPU, **_INDEXER},
        ),
        mtp_copy=(
            "mtp:Copy",
            "the fused copies alone, inside the graph, of a record that lies as the draft steps do",
            _ONLY_GPU,
        ),
        mtp_backend=("backend_mtp:MtpBackend", "the whole multi-step draft backend, likewise", _INDEXER),
    )
    | _subjects(
        "padded",
        padded=("padded:Padded", "DSV4 metadata and the DSpark draft block", _V4),
        padded_torch=("padded:PaddedInTorch", "the same functions in torch, as for CPU tensors", _V4),
        padded_low_ratios=(
            "padded:PaddedLowRatios",
            "DSV4.1 metadata, with the kernels of its low ratios",
            {**_V4, "low_ratios": True},
        ),
        padded_backend=(
            "backend_padded:PaddedBackend",
            "the whole attention backend of DeepSeek V4, likewise",
            {**_V4, "topk": 512, "window": 128},
        ),
    )
    | _subjects(
        "ragged_verify",
        ragged_verify=(
            "ragged:RaggedVerify",
            "padding to a graph, its sums, lengths and pages",
            {"compiles": _PADDING},
        ),
    )
    | _subjects(
        "dcp",
        dcp=("dcp:Dcp", "a decode step of a rope model, all of it", {}),
        dcp_rope=("dcp:RopeWrite", "the KV write of rows with a rope part", {}),
        dcp_nope=("dcp:NopeWrite", "the KV write of rows without one", _TWO_RANKS),
        dcp_nope_torch=("dcp:NopeWriteWithoutTriton", "the same in torch, for platforms without Triton", _TWO_RANKS),
        dcp_npu=(
            "dcp:Npu",
            "the packed selection in float32 of the NPU path, ids beyond 2**24",
            {**_TWO_RANKS, "first_page": _HIGH_PAGE},
        ),
        dcp_columns=(
            "dcp:Columns",
            "the gather of 2048 selected columns, from strided sources",
            {"topk": 2048, "input_view": "strided"},
        ),
        dcp_columns_far=(
            "dcp:FarColumns",
            "the same from a table of more than 2**31 entries, and dense sources",
            {"topk": 2048, "input_view": "plain"},
        ),
        dcp_columns_far_tiled=("dcp:FarColumns", "the gather of other widths, likewise", {"topk": 300}),
        dcp_columns_far_extend=("dcp:FarColumnsOfExtend", "the gather of extend tokens, likewise", {"topk": 300}),
        dcp_combine=("dcp:CombineMerge", "the merge after an exchange of heads", {}),
        dcp_gather=("dcp:GatherMerge", "the merge after a gather of log-sum-exps", {}),
        dcp_mha_merge=("dcp:MhaMerge", "the merge of the MHA backends, in torch", {**_TWO_RANKS, "log_base": "e"}),
    )
)
