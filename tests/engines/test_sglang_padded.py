"""SGLang's DSV4 and ragged-verify metadata as subjects: what the table says of them, what they cover in each mode and
what is refused; with SGLang itself, where it can be imported, every mode against the oracle."""

from __future__ import annotations

import importlib.util

import pytest
from support import DEVICE, backend

from dsa_verify.base.errors import UsageError
from dsa_verify.contract.finding import Diagnosis, Finding
from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.padded import PADDED_MODES
from dsa_verify.contract.round import Round
from dsa_verify.contract.subject import load_attribute
from dsa_verify.contract.system import OWN_TABLES
from dsa_verify.replay.setup import ReplaySetup
from dsa_verify.run.verify import Counts, verify_rounds
from dsa_verify.subjects.adapters import sglang
from dsa_verify.subjects.adapters.sglang.padded import Padded, PaddedLowRatios
from dsa_verify.subjects.adapters.sglang.ragged import RaggedVerify
from dsa_verify.systems.catalogue import OF_OTHERS, OF_THE_SUBJECT, SYSTEMS, resolve_geometry

SYSTEM = SYSTEMS["padded"]
NAMES = ["padded", "padded_torch", "padded_low_ratios"]
CORE = {"seq_lens_casual", "positions_casual", "page_table", "swa_page_indices", "swa_topk_lengths"}
C4 = {"c4_len_raw", "c4_len_clamped", "c4_out_loc"}
C128 = {"c128_len_raw", "c128_len_clamped", "c128_out_loc", "c128_page_indices"}
# Lengths on, below and above a page, a ratio and the window; padded; idle; other requests; more than the context holds.
ROUNDS = [
    Round(bucket=3, seq_lens=(1, 129, 513), requests=(3, 4, 5)),
    Round(bucket=3, seq_lens=(256, 15), requests=(5, 3), poison="plausible", remap=(5,)),
    Round(bucket=3, seq_lens=(), requests=(), poison="stale"),
    Round(bucket=3, seq_lens=(1203, 128, 4), requests=(6, 6, 2), poison="stale", twice=True),
]
FLOORS = [(0, 64, 513), (255, 0), (), (1100, 1100, 2)]
needs_sglang = pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang cannot be imported")


def geometry_of(name: str, mode: str, **overrides: object) -> Geometry:
    settings = {"padded_mode": mode, "draft_tokens": 4, "request_rows": 9, **overrides}
    return resolve_geometry(SYSTEM, f"sglang:{name}", "cpu", settings=settings)[0]


def covered(name: str, mode: str) -> set[str]:
    geometry = geometry_of(name, mode)
    factory = load_attribute(sglang.SUBJECTS[name].reference)
    layout = SYSTEM.layout(geometry, 3)
    missing = factory.not_covered(layout, DEVICE)
    assert all(missing.values())
    return {field.name for field in layout} - set(missing)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_covered(name: str) -> None:
    low = {field for field in covered("padded_low_ratios", "decode") if field.startswith(("c1_", "c2_"))}
    assert len(low) == 12
    compressed = low if name == "padded_low_ratios" else C4 | C128
    for mode in PADDED_MODES:
        drafts = mode in ("draft_block", "draft_extend")
        assert covered(name, mode) == CORE | (set() if drafts else compressed)


def test_the_presets_are_those_that_the_kernels_take() -> None:
    for name in NAMES:
        for device_type, preset in (("cuda", "deepseek_v4"), ("cpu", "small_v4")):
            geometry, fixed = resolve_geometry(SYSTEM, f"sglang:{name}", device_type)
            assert geometry.preset == preset
            assert geometry.page_size == 256
            own = {"low_ratios"} if name == "padded_low_ratios" else set()
            assert fixed == {OWN_TABLES, OF_OTHERS, *OF_THE_SUBJECT, "request_floors"} | own
    assert resolve_geometry(SYSTEM, "sglang:padded", "cpu", "tiny_v4")[0].preset == "tiny_v4"


@pytest.mark.parametrize(
    "subject, overrides, why",
    [
        (
            Padded,
            {"preset": "tiny_v4"},
            "dense_ratio: 8 is not 128, which SGLang's kernels have built in; use the preset",
        ),
        (Padded, {"page_size": 64, "dense_ratio": 64}, "dense_ratio: 64 is not 128"),
        (Padded, {"index_align": 32}, "index_align: 32 is not 64"),
        (Padded, {"sparse_ratio": 2}, "sparse_ratio: 2 is not 4"),
        (PaddedLowRatios, {"page_size": 64, "dense_ratio": 64}, "dense_ratio: 64 is not 128"),
    ],
)
def test_other_geometries_are_refused(subject: type, overrides: dict[str, object], why: str) -> None:
    """Before anything of SGLang is imported."""
    preset = str(overrides.pop("preset", "small_v4"))
    with pytest.raises(UsageError, match=why):
        subject().allocate(SYSTEMS["padded"].geometry(preset, overrides), None, None)


def test_pages_of_one_token_are_refused() -> None:
    with pytest.raises(UsageError, match="page_size: 1 has no page table of its own"):
        RaggedVerify().allocate(SYSTEMS["ragged_verify"].geometry("tiny", {"page_size": 1}), None, None)  # type: ignore[arg-type]


def test_what_ragged_verify_covers() -> None:
    layout = SYSTEMS["ragged_verify"].layout(SYSTEMS["ragged_verify"].geometry("tiny", {"draft_tokens": 3}), 4)
    missing = RaggedVerify.not_covered(layout, DEVICE)
    assert set(missing) == {
        "cu_seqlens_q",
        "dsa_cache_seqlens_int32",
        "dsa_cu_seqlens_q",
        "dsa_cu_seqlens_k",
        "page_table_1",
        "paged_mqa_ctx_lens_2d",
    }


# SGLang itself -------------------------------------------------------------------------------------------------------


def findings_of(name: str, geometry: Geometry, rounds: list[Round], system: str = "padded") -> list[Finding]:
    setup = ReplaySetup.make(SYSTEMS[system], geometry, (rounds[0].bucket, 2), 0, f"sglang:{name}", None, backend())
    counts = Counts()
    findings = verify_rounds(setup, [setup.table(rounds)], counts, folder=None)
    assert counts.elements_compared
    return findings


@needs_sglang
@pytest.mark.parametrize("form", ["plain", "strided"])
@pytest.mark.parametrize("mode", ["decode", "verify", "draft_block"])
@pytest.mark.parametrize("name", NAMES)
def test_every_mode_is_right(name: str, mode: str, form: str) -> None:
    index_dtype = "int32" if form == "strided" else "int64"
    geometry = geometry_of(name, mode, input_view=form, index_dtype=index_dtype)
    assert findings_of(name, geometry, ROUNDS) == []


@needs_sglang
@pytest.mark.parametrize("mode", ["decode", "draft_block"])
@pytest.mark.parametrize("name", NAMES)
def test_a_replay_floor_is_right(name: str, mode: str) -> None:
    assert findings_of(name, geometry_of(name, mode, replay_floor=11), ROUNDS[:2]) == []


@needs_sglang
@pytest.mark.parametrize("mode", ["decode", "verify", "draft_block"])
@pytest.mark.parametrize("name", NAMES)
def test_floors_of_each_request_are_right(name: str, mode: str) -> None:
    rounds = [r.replace(replay_floors=floors) for r, floors in zip(ROUNDS, FLOORS, strict=True)]
    assert findings_of(name, geometry_of(name, mode, request_floors=True), rounds) == []


@needs_sglang
@pytest.mark.parametrize("name", NAMES)
def test_draft_extend_is_right_but_for_lengths_below_0(name: str) -> None:
    """Rows before a request's first token keep their negative length in the window (contract 7.1), where the oracle
    stops at 0; so do all pad rows."""
    geometry = geometry_of(name, "draft_extend")
    assert findings_of(name, geometry, [Round(bucket=3, seq_lens=(4, 129, 1203), requests=(3, 4, 5))]) == []
    found = findings_of(name, geometry, ROUNDS)
    assert [(each.field, each.diagnosis) for each in found] == [("swa_topk_lengths", Diagnosis.OUT_OF_RANGE)]


@needs_sglang
def test_ragged_verify_is_right() -> None:
    geometry = SYSTEMS["ragged_verify"].geometry(
        "tiny", {"context": 37, "request_rows": 9, "draft_tokens": 3, "graph_tokens": 9}
    )
    rounds = [
        Round(bucket=4, seq_lens=(9, 37, 17), requests=(3, 4, 5), lens={"verify_lens": (3, 1, 2)}),
        Round(
            bucket=4,
            seq_lens=(1, 4, 8, 3),
            requests=(3, 3, 5, 6),
            lens={"verify_lens": (2, 2, 1, 3)},
            poison="plausible",
        ),
        Round(bucket=4, seq_lens=(), requests=(), lens={"verify_lens": ()}, poison="stale"),
    ]
    assert findings_of("ragged_verify", geometry, rounds, "ragged_verify") == []
