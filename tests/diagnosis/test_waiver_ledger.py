"""Ledgers: what is read, what is refused and why, and which versions a waiver is for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import EagerDecode, small
from waiver_support import (
    DSA,
    STALE,
    UnwrittenLengths,
    entry_of,
    ledger_of,
    toml_of,
)

from dsa_verify.base.errors import UsageError
from dsa_verify.contract.finding import Diagnosis
from dsa_verify.systems.catalogue import SYSTEMS
from dsa_verify.systems.engines import engine_subject
from dsa_verify.waivers.waivers import (
    SHIPPED,
    WAIVABLE,
    check_names,
    choose_ledger,
    fields_of,
    parse_ledger,
    read_ledger,
)


def test_the_shipped_ledger_names_subjects_that_are_there() -> None:
    for waiver in read_ledger(SHIPPED).waivers:
        engine = engine_subject(waiver.subject)
        assert engine is not None
        assert engine.system == waiver.system
        assert "contract" in waiver.reason


def test_a_ledger_is_read_from_toml_and_json(tmp_path: Path) -> None:
    entry = entry_of(UnwrittenLengths, when={"topk": ">=4,<9", "indexer": False}, shows={"rounds": 17, "bucket": ">1"})
    ledger = read_ledger(toml_of(tmp_path, entry))
    path = tmp_path / "ledger.json"
    path.write_text(json.dumps({"schema": 1, "waiver": [entry]}))
    assert read_ledger(path).waivers == ledger.waivers
    (waiver,) = ledger.waivers
    assert [(c.name, c.comparison, c.value) for c in waiver.when] == [
        ("topk", ">=", 4),
        ("topk", "<", 9),
        ("indexer", "==", False),
    ]
    assert waiver.covers(small(), 4)
    assert not waiver.covers(small(topk=9), 4)
    assert waiver.must_show(small(), 2, 17)
    assert not waiver.must_show(small(), 1, 17)
    assert not waiver.must_show(small(), 2, 16)
    assert not ledger_of(UnwrittenLengths).waivers[0].must_show(small(), 2, 0), "nothing was checked"


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"note": "x"}, "waiver[0].note: unknown; its keys are id, subject"),
        ({"reason": None}, "waiver[0].reason: missing; every waiver has id, subject"),
        ({"reason": "  "}, "waiver[0].reason: '  ' is no text; say it in words"),
        ({"id": "Gap!"}, "waiver[0].id: 'Gap!' is not of small letters"),
        ({"system": "nope"}, "waiver[0].system: 'nope' is unknown; use one of decode"),
        ({"field": "nope"}, "field: 'nope' is no field of decode that owns memory; those are cache_seqlens_int32"),
        ({"field": "dsa_seqlens_expanded"}, "'dsa_seqlens_expanded' is no field of decode that owns memory"),
        ({"field": []}, "waiver[0].field: [] is neither a text nor a list of different ones"),
        ({"field": [DSA, DSA]}, "is neither a text nor a list of different ones"),
        ({"diagnosis": "nope"}, "waiver[0].diagnosis: 'nope' is nothing that can be waived; use one of never written"),
        ({"diagnosis": "past the end"}, "'past the end' is nothing that can be waived"),
        ({"diagnosis": "input overwritten"}, "'input overwritten' is nothing that can be waived"),
        ({"diagnosis": "law broken"}, "'law broken' is nothing that can be waived"),
        ({"law": "nope", "field": "paged_mqa_schedule_metadata"}, "law: 'nope' is unknown; use one of form, order"),
        ({"law": "order"}, f"law: {DSA} is no schedule"),
        ({"subject_says": ""}, "waiver[0].subject_says: '' is no text; say it in words"),
        ({"cause": "a cosmic ray"}, "waiver[0].cause: 'a cosmic ray' is unknown; use one of poison left, "),
        ({"cause": []}, "waiver[0].cause: [] is neither a text nor a list of different ones"),
        ({"versions": {}}, "waiver[0].versions: {} must name packages and their versions"),
        ({"versions": ">=1"}, "waiver[0].versions: '>=1' must name packages"),
        ({"versions": {"sglang": ""}}, "waiver[0].versions.sglang: '' is no range of versions"),
        ({"versions": {"sglang": "0.5.x"}}, "waiver[0].versions.sglang: '0.5.x' is no range of versions"),
        ({"when": {"pages": 1}}, "waiver[0].when.pages: unknown; use bucket, or a field of the geometry"),
        ({"when": {"rounds": 1}}, "waiver[0].when.rounds: unknown"),
        ({"when": {"topk": "8 or so"}}, "waiver[0].when.topk: '8 or so' does not compare with it"),
        ({"when": {"indexer": ">=1"}}, "waiver[0].when.indexer: '>=1' does not compare with it"),
        ({"when": {"topk": True}}, "waiver[0].when.topk: True does not compare with it"),
        ({"subject": "sglang:nope"}, "subject 'sglang:nope' is unknown; sglang has"),
        ({"subject": "sglang:decode", "system": "mtp", "field": STALE}, "sglang:decode is of decode, not of mtp"),
    ],
    ids=str,
)
def test_what_is_not_exactly_so_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_names(ledger_of("support:EagerDecode", **changes))
    assert said in str(caught.value)


def test_two_waivers_of_one_field_are_refused() -> None:
    twice = [entry_of("support:EagerDecode"), entry_of("support:EagerDecode", id="other", when={"bucket": 2})]
    with pytest.raises(UsageError, match=r"waiver\[1\].id: 'known' is used twice"):
        parse_ledger([twice[0], twice[0]], "test")
    ledger = parse_ledger(twice, "test")
    with pytest.raises(UsageError, match=f"test: waivers known and other both cover {DSA} of support:EagerDecode at"):
        ledger.applying("decode", "support:EagerDecode", small(), (4, 2), EagerDecode)
    assert len(ledger.applying("decode", "support:EagerDecode", small(), (4,), EagerDecode)) == 1


@pytest.mark.parametrize(
    "text, said",
    [
        ("schema = 2", "must hold schema = 1"),
        ("schema = 1\nwaivers = []", "and nothing else"),
        ("schema = 1\nwaiver = 3", "must be a list of tables"),
        ("schema = ", "cannot be read as a ledger of waivers"),
        pytest.param("x = " + "[" * 9999, "it nests too deeply; flatten it", id="deep"),
    ],
)
def test_a_file_that_is_no_ledger_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=f"^{path}: .*{said}"):
        read_ledger(path)
    with pytest.raises(UsageError, match=r"missing.toml: cannot be read"):
        read_ledger(tmp_path / "missing.toml")


def test_a_file_without_waivers_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "empty.toml"
    path.write_text("schema = 1\n")
    with pytest.raises(UsageError, match=r"empty.toml: holds no \[\[waiver\]\]; add one, or give --dsa-no-waivers"):
        choose_ledger(path, False, prefix="dsa-")


class OfAnEngine(EagerDecode):
    @staticmethod
    def provenance() -> dict[str, str]:
        return {"dsa-verify": "7.2.0rc1", "engine": "unknown (no metadata)"}


@pytest.mark.parametrize(
    "versions, why",
    [
        ({"dsa-verify": ">=7,<8"}, None),
        ({"dsa-verify": "<7"}, "dsa-verify 7.2.0rc1 is outside <7"),
        ({"dsa-verify": ">=7", "packaging": ">=1"}, None),
        ({"packaging": "<1"}, "is outside <1"),
        ({"engine": ">=0"}, "engine 'unknown (no metadata)' is no version that can be compared with >=0"),
        ({"no-such-package": ">=0"}, "no-such-package is not what x is made of, and is not installed"),
    ],
    ids=str,
)
def test_versions_are_what_the_subject_says_or_what_is_installed(versions: dict[str, str], why: str | None) -> None:
    ledger = ledger_of("x", versions=versions)
    assert len(ledger.applying("decode", "x", small(), (4,), OfAnEngine)) == (why is None)
    lines = ledger.outside("decode", "x", OfAnEngine)
    assert (not lines) if why is None else lines[0].endswith(why)


def test_every_system_has_fields_to_waive() -> None:
    for name, system in SYSTEMS.items():
        geometry = system.geometry(system.preset("cpu"))
        owned = {field.name for field in system.layout(geometry, 4) if field.alias is None}
        assert owned <= set(fields_of(name)), name
    assert {"rank7_kv_pool", "merged_lse"} <= set(fields_of("dcp"))
    assert {"step6_topk_v2_plan", "step0_write_plan_write_loc"} <= set(fields_of("mtp"))
    assert "write_plan_effective_n_per_batch" in fields_of("draft_extend")


def test_only_what_the_words_of_a_field_are_called_can_be_waived() -> None:
    never = {"PAST_THE_END", "BEFORE_THE_START", "OTHER_BUCKET", "INPUT_OVERWRITTEN", "TAIL_NOT_RESET", "WRONG_ROUTE"}
    never |= {"LAW_BROKEN", "BUFFER_REPLACED", "NOT_IDEMPOTENT", "WRONG_OUTPUTS", "RAISES", "SYNCHRONISES", "ALLOCATES"}
    assert not never & {each.name for each in WAIVABLE}
    assert never <= {each.name for each in Diagnosis}
