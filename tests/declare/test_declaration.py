"""A declaration: what one says wrongly is refused by name, and what one says is what is judged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from declared import Everything, LeavesSome, LiveOnTheHost, NothingLive, OtherShape, Random, ReadsOnTheHost, Unmet
from support import backend

from dsa_verify import Count, In, Length, Metadata, Out, PageTable, RequestRow, Uniform
from dsa_verify.base.errors import STATUS_EQUAL, STATUS_MISMATCH, STATUS_NOTHING_VERIFIED, UsageError
from dsa_verify.contract.layout import Row
from dsa_verify.contract.round import Round, Scenario
from dsa_verify.rounds.matrix import diagnostic_matrix
from dsa_verify.run.runner import Runner, RunResult, new_result, status_of
from dsa_verify.systems import catalogue


@pytest.fixture(autouse=True)
def systems_of_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "SYSTEMS", dict(catalogue.SYSTEMS))
    monkeypatch.setattr(catalogue, "_REFERENCES", {})


def run(declaration: type[Metadata], subject: str | None = None, *, keep_going: bool = False) -> RunResult:
    system = catalogue.get_system(catalogue.known_as(declaration))
    geometry, fixed = catalogue.resolve_geometry(system, subject, "cpu")
    result = new_result(system.name, subject, backend())
    configs = diagnostic_matrix(system, geometry, batches=[2, 5], drafts=[3] if system.drafts else None, fixed=fixed)
    Runner(backend=backend(), folder=None, keep_going=keep_going).matrix(configs, subject, result)
    return result


# What is declared ----------------------------------------------------------------------------------------------------


def test_all_that_can_be_declared_is_judged_equal() -> None:
    result = run(Everything)
    assert (status_of([result]), result.findings) == (STATUS_EQUAL, [])
    assert result.counts.occurred == {"a length past the top-k": True, "something of some is read": True}


def test_rows_follow_from_the_first_dimension() -> None:
    system = Everything.system
    layout = system.layout(catalogue.resolve_geometry(system, None, "cpu", settings={"draft_tokens": 3})[0], 5)
    assert {field.name: (field.row, field.shape[0]) for field in layout if field.row is not Row.LAW} == {
        "sums": (Row.TOKEN_PREFIX, 16),
        "seen": (Row.TOKEN, 15),
        "mix": (Row.TOKEN, 15),
        "some": (Row.REQUEST, 5),
        "pages": (Row.TOKEN, 15),
        "third": (Row.REQUEST, 5),
        "fixed": (Row.REQUEST, 5),
        "lens_again": (Row.TOKEN, 15),
    }


def test_a_wrong_subject_is_found_and_a_law_is_told_beside_it() -> None:
    result = run(Everything, "off_by_one")
    assert status_of([result]) == STATUS_MISMATCH
    by_field = {finding.field: finding for finding in result.findings}
    assert set(by_field) == {"sums", "sums_begin_with_zero"}
    assert by_field["sums_begin_with_zero"].sentence.endswith("sums_begin_with_zero does not hold: The first sum is 0")


def test_what_is_not_live_may_hold_anything() -> None:
    assert status_of([run(Everything, "beyond_what_is_live")]) == STATUS_EQUAL


def test_a_run_without_what_must_occur_proves_nothing() -> None:
    result = run(Unmet)
    assert status_of([result]) == STATUS_NOTHING_VERIFIED
    assert result.counts.missing == ["a negative length"]


def test_a_case_need_not_show_what_must_occur() -> None:
    system = catalogue.get_system(catalogue.known_as(Unmet))
    round_ = Round(bucket=1, seq_lens=(3,), requests=(1,))
    case = Scenario(system=system.name, geometry=system.geometry("tiny"), buckets=(1,), rounds=(round_,))
    result = new_result(system.name, None, backend())
    Runner(backend=backend(), folder=None).case(case, None, result)
    assert (status_of([result]), result.counts.missing) == (STATUS_EQUAL, [])


def test_a_test_without_what_must_occur_fails(dsa: Any) -> None:
    with pytest.raises(pytest.fail.Exception, match="what must occur has not: a negative length; give it other"):
        dsa.verify(Unmet)


def test_a_live_rule_that_covers_nothing_proves_nothing() -> None:
    result = run(NothingLive)
    assert status_of([result]) == STATUS_NOTHING_VERIFIED
    assert result.counts.missing == ["something of same is read"]


def test_a_reference_that_cannot_be_captured_runs_eagerly_and_the_result_says_so() -> None:
    result = run(ReadsOnTheHost)
    assert status_of([result]) == STATUS_EQUAL
    assert result.counts.eager_oracle
    assert run(Everything).counts.eager_oracle == ""


@pytest.mark.parametrize(
    ("declaration", "message"),
    [
        (Random, "Random.reference gave same other values when it ran again on the same inputs"),
        (LeavesSome, r"LeavesSome.reference leaves 2 of 4 words of same as they were, the first at \[0\]"),
        (OtherShape, r"OtherShape.more: its function gives \[2\] on cpu; it must be a tensor \[2, 2\] on cpu"),
        (LiveOnTheHost, "LiveOnTheHost.same: live gives a int; compute it of the inputs, on cpu"),
    ],
)
def test_a_reference_is_checked_before_it_is_believed(declaration: type[Metadata], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        run(declaration)


# What is refused -----------------------------------------------------------------------------------------------------


def declare(**said: Any) -> None:
    """Make a class at the top level of this module that says `said`."""
    methods = {"reference": lambda self, i, o: None, "subject": lambda self, i, o: None}
    right = {"lens": In("int64[B]", Length()), "same": Out("int64[B]")}
    type("Wrong", (Metadata,), {"__qualname__": "Wrong", "__module__": __name__, **right, **methods, **said})


REFUSED: Mapping[str, tuple[dict[str, Any], str]] = {
    "no draw": ({"lens": In("int64[B]", None)}, "Wrong.lens: its draw is None; give one of Length"),
    "no form": ({"lens": In("B", Length())}, "Wrong.lens: 'B' is no form; write a dtype"),
    "dtype": ({"lens": In("int8[B]", Length())}, "Wrong.lens: dtype 'int8' is not one of int32, int64, float32"),
    "form of a length": ({"lens": In("int64[B, N]", Length())}, r"Wrong.lens: .* Length; use int64 or int32\[B\]"),
    "form of a table": ({"t": In("int64[R, C]", PageTable())}, r"Wrong.t: .* PageTable; use int32\[R, C\]"),
    "form of a count": ({"t": In("int32[T]", Count())}, r"Wrong.t: .* Count; use int32\[B\]"),
    "two lengths": ({"more": In("int64[B]", Length())}, "Wrong.more: lens is drawn by Length, too"),
    "two dtypes": ({"r": In("int32[B]", RequestRow())}, "Wrong.r: lengths and request rows have one dtype"),
    "no rows of the batch": ({"t": In("int32[R]", Uniform(0, 2))}, r"Wrong.t: 'int32\[R\]' has no rows of the batch"),
    "no whole rows": ({"t": In("int32[B + 1]", Uniform(0, 2))}, "Wrong.t: 'B [+] 1' is no multiple of B"),
    "unknown size": ({"same": Out("int64[Z]")}, "Wrong.same: shape: 'Z' is no size|shape: 'Z' is no size"),
    "unknown row": ({"same": Out("int64[K]")}, "Wrong.same: what a row stands for does not follow from 'K'"),
    "three dimensions": ({"same": Out("int64[B, 2, 2]")}, "Wrong.same: .* has 3 dimensions"),
    "no other output": ({"same": Out("int64[B]", view_of="same")}, "Wrong.same: view_of='same' is no other output"),
    "step and live": ({"same": Out("int64[B]", step=1, live=len)}, "Wrong.same: step and live both say"),
    "bound of integers": ({"same": Out("int64[B]", bound=0.1)}, "Wrong.same: bound=0.1 is for float32, not int64"),
    "a size that is taken": ({"sizes": {"B": 3}}, "Wrong.sizes: 'B' is no size of your own: .*; B is requests of"),
    "no reference": ({"reference": None}, "Wrong: there is no reference"),
    "no subject": ({"subject": None}, "Wrong: there is no subject"),
    "local": ({"__qualname__": "test.<locals>.Wrong"}, "Wrong: a declaration stands at the top level of a module"),
}


@pytest.mark.parametrize("wrong", REFUSED)
def test_what_is_said_wrongly_is_refused_where_it_is_written(wrong: str) -> None:
    said, message = REFUSED[wrong]
    with pytest.raises(UsageError, match=message):
        declare(**said)
