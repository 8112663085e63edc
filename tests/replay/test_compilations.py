"""Compilations: which argument made a kernel compile again, in words, and who may do so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import EagerDecode, decode_round, setup_of

from dsa_verify.contract.finding import Diagnosis, Finding
from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.subject import Buffers, Inputs
from dsa_verify.replay import compilations
from dsa_verify.rounds.case_file import read_case
from dsa_verify.run.verify import Counts, verify_rounds
from dsa_verify.systems.engines import engine_subjects
from dsa_verify.waivers.waivers import NO_WAIVERS, Ledger, choose_ledger

ROUNDS = [decode_round(4, 5 + i, 6) for i in range(5)]
DIVISIBLE = [["tt.divisibility", 16]]


@pytest.fixture(autouse=True)
def nothing_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilations, "_seen", [])


def hook(kernel: str = "fill", **changes: Any) -> None:
    """What Triton's hook is given, for a kernel `(out, count, value, BLOCK: constexpr)`."""
    params = [SimpleNamespace(name=name, is_constexpr=name == "BLOCK") for name in ("out", "count", "value", "BLOCK")]
    compiled = {
        "signature": {"out": "*i32", "count": "i32", "value": "fp32", "BLOCK": "constexpr"},
        "constants": {(3,): 64},
        "configs": [{(0,): DIVISIBLE, (1,): [], (3,): []}],
        "num_warps": 4,
    }
    function = SimpleNamespace(module="engine.kernels", name=kernel, jit_function=SimpleNamespace(params=params))
    compilations._note(function, {**compiled, **changes})


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "one": (
        {
            "signature": {"out": "*i32", "count": "constexpr", "value": "fp32", "BLOCK": "constexpr"},
            "constants": {(1,): 1, (3,): 64},
        },
        "count is equal to 1 and was i32, neither 1 nor divisible by 16",
    ),
    "divisible": (
        {"configs": [{(0,): DIVISIBLE, (1,): DIVISIBLE, (3,): []}]},
        "count is i32, divisible by 16 and was i32, neither 1 nor divisible by 16",
    ),
    "alignment": (
        {"configs": [{(0,): [], (1,): [], (3,): []}]},
        "out is a pointer to i32 that is not aligned to 16 bytes and was a pointer to i32 aligned to 16 bytes",
    ),
    "dtype": (
        {"signature": {"out": "*i32", "count": "i64", "value": "fp64", "BLOCK": "constexpr"}},
        "count is i64, neither 1 nor divisible by 16 and was i32, neither 1 nor divisible by 16, value is fp64 and was "
        "fp32",
    ),
    "constexpr": ({"constants": {(3,): 128}}, "BLOCK is the constexpr 128 and was the constexpr 64"),
    "warps": ({"num_warps": 8}, "num_warps is 8 and was 4"),
}


@pytest.mark.parametrize("changes, said", CHANGES.values(), ids=list(CHANGES))
def test_the_argument_that_made_it_compile_again_is_named(changes: dict[str, Any], said: str) -> None:
    hook()
    hook("another", num_warps=16)
    hook(**changes)
    assert compilations._seen[-1].sentence == f"engine.kernels.fill was compiled again, as its argument {said}"


def test_the_most_similar_form_is_what_it_is_compared_with() -> None:
    hook(num_warps=8, constants={(3,): 128})
    hook()
    hook(num_warps=2, constants={(3,): 32})
    hook(constants={(3,): 256})
    assert compilations._seen[-1].sentence.endswith("BLOCK is the constexpr 256 and was the constexpr 64")


def test_the_first_form_and_one_that_is_alike_are_called_so() -> None:
    hook()
    hook()
    first, again = compilations._seen
    assert first.sentence == "engine.kernels.fill was compiled for the first time, which the warm-up had not done"
    assert again.sentence == "engine.kernels.fill was compiled again for arguments of the same classes"


def test_what_a_triton_does_not_tell_is_left_out() -> None:
    compilations._note(SimpleNamespace(module="engine", name="old"), {"signature": {"n": "i32"}})
    assert compilations._seen[-1].arguments == {"n": "i32"}


def test_kernels_of_the_harness_are_not_noted() -> None:
    compilations._note(SimpleNamespace(module="dsa_verify.buffers.region_kernels", name="_judge_kernel"), {})
    assert compilations._seen == []


# While rounds run ----------------------------------------------------------------------------------------------------


class CompilesLate(EagerDecode):
    """As if its kernel took an integer that follows the lengths: one form in the warm-up, another from length 8 on."""

    def before_replay(self) -> None:
        longest = int(self.inputs.seq_lens.max())
        if longest == 1 and not compilations._seen:
            hook()
        if longest == 8:
            hook(**CHANGES["divisible"][0])


def verify(ledger: Ledger = NO_WAIVERS, folder: Path | None = None) -> tuple[list[Finding], Counts]:
    counts, setup = Counts(), replace(setup_of(CompilesLate, buckets=(4,)), ledger=ledger)
    return verify_rounds(setup, [setup.table(ROUNDS)], counts, folder=folder), counts


def test_a_late_compilation_is_a_finding_with_its_kernel_argument_round_and_case(tmp_path: Path) -> None:
    (finding,), counts = verify(folder=tmp_path)
    assert finding.diagnosis is Diagnosis.RECOMPILES
    assert finding.sentence == (
        "recompiles: bucket 4, round 3: engine.kernels.fill was compiled again, as its argument count is i32, "
        "divisible by 16 and was i32, neither 1 nor divisible by 16; a server would stall there"
    )
    assert (finding.bucket, finding.round, finding.differing) == (4, 3, 1)
    assert read_case(Path(finding.case or "")).rounds == tuple(ROUNDS[:4])
    assert counts.compilations_after_warmup == 1


def test_what_the_warm_up_compiles_is_none() -> None:
    setup = setup_of(CompilesLate, buckets=(4,))
    assert verify_rounds(setup, [setup.table(ROUNDS[:2])], Counts(), folder=None) == []
    assert len(compilations._seen) == 1


def test_an_option_allows_them() -> None:
    findings, counts = verify(NO_WAIVERS.allowing_compilations(True))
    assert findings == []
    assert counts.compilations_after_warmup == 1


def test_engines_that_are_known_to_say_so() -> None:
    known = {subject.name for subject in engine_subjects() if subject.compiles}
    assert {name.partition(":")[0] for name in known} == {"sglang", "vllm"}
    assert "sglang:ragged_verify" in known
    shipped = choose_ledger(None, False)
    assert "26 in 272 replays" in shipped.may_compile("sglang:ragged_verify")
    assert shipped.may_compile("sglang:decode") == shipped.may_compile("triton") == ""
    assert choose_ledger(None, True).may_compile("sglang:ragged_verify") == "", "--no-waivers judges this, too"


def test_allowing_them_chooses_no_ledger() -> None:
    ledger = choose_ledger(None, False).allowing_compilations(True)
    ledger.refuse_if_idle([("decode", "triton")])
    assert ledger.options == ("--allow-compilations",)


# A real kernel -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("length, said", [(1, "equal to 1"), (32, "i32, divisible by 16")])
def test_a_kernel_that_takes_the_longest_length_compiles_late(length: int, said: str) -> None:
    import triton
    import triton.language as tl

    @triton.jit
    def late_kernel(out, longest):
        tl.store(out, longest)

    class Late(EagerDecode):
        def allocate(self, geometry: Geometry, inputs: Inputs, buffers: Buffers) -> None:
            super().allocate(geometry, inputs, buffers)
            self.scratch = torch.zeros(4, dtype=torch.int32, device=inputs.seq_lens.device)
            self.calls = 0

        def before_replay(self) -> None:
            self.calls += 1
            # At capture every length is 1, which is another form.
            late_kernel[(1,)](self.scratch, 7 if self.calls <= 4 else int(self.inputs.seq_lens.max()))

    setup = setup_of(Late, buckets=(4,))
    rounds = [decode_round(4, 7), decode_round(4, 9), decode_round(4, 11), decode_round(4, length)]
    (finding,) = verify_rounds(setup, [setup.table(rounds)], Counts(), folder=None)
    assert finding.diagnosis is Diagnosis.RECOMPILES
    assert finding.round == 3
    assert "late_kernel was compiled again, as its argument longest is " in finding.sentence
    assert f"longest is {said} and was i32, neither 1 nor divisible by 16" in finding.sentence
