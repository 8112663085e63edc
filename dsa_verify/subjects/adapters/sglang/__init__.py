"""Subjects that run SGLang's own published code. This table names them; importing it imports none of that code."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from dsa_verify.systems.engines import EngineSubject

_PACKAGE: Final = "dsa_verify.subjects.adapters.sglang"
# Slots of such pages of 4 tokens or more pass 2**24, from where on float32 does not hold every integer.
HIGH_PAGE: Final = 1 << 22
# On a GPU with the indexer, whose schedules and plans nobody builds on a CPU.
BASIC_PRESETS: Final = ("deepseek_v32_indexer", "tiny")
V4_PRESETS: Final = ("deepseek_v4", "small_v4")


def _subject(
    name: str,
    system: str,
    place: str,
    summary: str,
    *,
    needs_gpu: bool = False,
    presets: tuple[str, str] | None = None,
    compiles: str = "",
    **settings: object,
) -> EngineSubject:
    """`place`: module of this package and attribute, "basic:Decode"."""
    return EngineSubject(
        name=f"sglang:{name}",
        system=system,
        reference=f"{_PACKAGE}.{place}",
        summary=summary,
        needs_gpu=needs_gpu,
        presets=presets,
        settings=MappingProxyType(settings),
        compiles=compiles,
    )


# By the name after the colon.
SUBJECTS: Final[Mapping[str, EngineSubject]] = MappingProxyType(
    {
        subject.name.partition(":")[2]: subject
        for subject in (
            _subject(
                "decode",
                "decode",
                "basic:Decode",
                "the fused decode kernels, and what follows them",
                presets=BASIC_PRESETS,
            ),
            _subject(
                "target_verify",
                "target_verify",
                "basic:TargetVerify",
                "the fused verify kernels, likewise",
                presets=BASIC_PRESETS,
            ),
            _subject(
                "draft_extend",
                "draft_extend",
                "basic:DraftExtend",
                "the fused draft-extend kernels, likewise",
                presets=BASIC_PRESETS,
                compiles="its ragged form is made anew for a batch and for token totals that are 1 or divisible by 16",
            ),
            _subject(
                "mtp",
                "mtp",
                "mtp:Mtp",
                "one record, the fused copies to one and to three draft steps, and what follows them",
                needs_gpu=True,
                indexer=True,
            ),
            _subject(
                "mtp_sibling",
                "mtp",
                "mtp:Sibling",
                "draft step 0 refreshed from the record, the others copied from it",
                needs_gpu=True,
                indexer=True,
            ),
            _subject(
                "mtp_copy",
                "mtp",
                "mtp:Copy",
                "the fused copies alone, inside the graph, of a record that lies as the draft steps do",
                needs_gpu=True,
            ),
            # Of each request or of none: 0.5.22 has no floors, so a run that wants them says request_floors=true.
            _subject(
                "padded",
                "padded",
                "padded:Padded",
                "DSV4 metadata and the DSpark draft block",
                presets=V4_PRESETS,
                request_floors=False,
            ),
            _subject(
                "padded_torch",
                "padded",
                "padded:PaddedInTorch",
                "the same functions in torch, as for CPU tensors",
                presets=V4_PRESETS,
                request_floors=False,
            ),
            _subject(
                "padded_low_ratios",
                "padded",
                "padded:PaddedLowRatios",
                "DSV4.1 metadata, with the kernels of its low ratios",
                presets=V4_PRESETS,
                low_ratios=True,
                request_floors=False,
            ),
            _subject(
                "ragged_verify",
                "ragged_verify",
                "ragged:RaggedVerify",
                "padding to a graph, its sums, lengths and pages",
                compiles="kernels of its padding are made anew for values of a batch, 26 in 272 replays on an H200",
            ),
            _subject("dcp", "dcp", "dcp:Dcp", "a decode step of a rope model, all of it"),
            _subject("dcp_rope", "dcp", "dcp:RopeWrite", "the KV write of rows with a rope part"),
            _subject("dcp_nope", "dcp", "dcp:NopeWrite", "the KV write of rows without one", dcp_size=2),
            _subject(
                "dcp_nope_torch",
                "dcp",
                "dcp:NopeWriteWithoutTriton",
                "the same in torch, for platforms without Triton",
                dcp_size=2,
            ),
            _subject(
                "dcp_npu",
                "dcp",
                "dcp:Npu",
                "the packed selection in float32 of the NPU path, ids beyond 2**24",
                dcp_size=2,
                first_page=HIGH_PAGE,
            ),
            _subject(
                "dcp_columns",
                "dcp",
                "dcp:Columns",
                "the gather of 2048 selected columns, from strided sources",
                topk=2048,
                input_view="strided",
            ),
            _subject(
                "dcp_columns_far",
                "dcp",
                "dcp:FarColumns",
                "the same from a table of more than 2**31 entries, and dense sources",
                topk=2048,
                input_view="plain",
            ),
            _subject(
                "dcp_columns_far_tiled", "dcp", "dcp:FarColumns", "the gather of other widths, likewise", topk=300
            ),
            _subject(
                "dcp_columns_far_extend",
                "dcp",
                "dcp:FarColumnsOfExtend",
                "the gather of extend tokens, likewise",
                topk=300,
            ),
            _subject("dcp_combine", "dcp", "dcp:CombineMerge", "the merge after an exchange of heads"),
            _subject("dcp_gather", "dcp", "dcp:GatherMerge", "the merge after a gather of log-sum-exps"),
            _subject(
                "dcp_mha_merge",
                "dcp",
                "dcp:MhaMerge",
                "the merge of the MHA backends, in torch",
                dcp_size=2,
                log_base="e",
            ),
            _subject(
                "decode_backend",
                "decode",
                "backend:DecodeBackend",
                "the whole attention backend through its graph hooks",
                indexer=True,
            ),
            _subject(
                "target_verify_backend",
                "target_verify",
                "backend:TargetVerifyBackend",
                "the whole attention backend, likewise",
                indexer=True,
            ),
            _subject(
                "draft_extend_backend",
                "draft_extend",
                "backend:DraftExtendBackend",
                "the whole attention backend, likewise",
                indexer=True,
            ),
            _subject(
                "mtp_backend",
                "mtp",
                "backend_mtp:MtpBackend",
                "the whole multi-step draft backend, likewise",
                indexer=True,
            ),
            _subject(
                "padded_backend",
                "padded",
                "backend_padded:PaddedBackend",
                "the whole attention backend of DeepSeek V4, likewise",
                presets=("deepseek_v4", "small_v4"),
                topk=512,
                window=128,
                request_floors=False,
            ),
        )
    }
)
