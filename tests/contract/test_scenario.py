"""Case files: what is written reads back equal, and what is wrong is refused in one line that says where and why."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsa_verify.base.errors import UsageError
from dsa_verify.contract.geometry import PRESETS, SHARED_FIELDS, Geometry
from dsa_verify.contract.round import POISONS, SEED_LIMIT, Round, Scenario
from dsa_verify.contract.round_table import tabulate
from dsa_verify.rounds.case_file import parse_case, read_case
from dsa_verify.systems.catalogue import SYSTEMS


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    system = draw(st.sampled_from(tuple(SYSTEMS)))
    geometry = SYSTEMS[system].geometry(
        draw(st.sampled_from(list(PRESETS))),
        {
            "context": draw(st.integers(20, 300)),  # a pooled pad row has up to 16 + 4 tokens
            "draft_tokens": 1 if system in ("decode", "mtp", "dcp") else draw(st.integers(1, 16)),
            "request_rows": draw(st.integers(2, 9)),
            "indexer": False,  # asks more of the lengths; a test of its own
            "index_dtype": draw(st.sampled_from(["int32", "int64"])),
            "warm_ups": draw(st.sampled_from(["refreshed", "together"])),
        },
    )
    buckets = tuple(draw(st.lists(st.integers(1, 20), min_size=1, max_size=3, unique=True)))

    def round_(bucket: int) -> Round:
        raw = draw(st.integers(0, bucket))

        def several(low: int, high: int) -> tuple[int, ...]:
            return tuple(draw(st.lists(st.integers(low, high), min_size=raw, max_size=raw)))

        def verified() -> dict[str, tuple[int, ...]]:
            return {"verify_lens": several(1, geometry.draft_tokens)} if system == "ragged_verify" else {}

        ragged = system == "draft_extend" and draw(st.booleans())
        rows = st.integers(1, geometry.request_rows - 1)
        remap = tuple(draw(st.lists(rows, max_size=3)))
        return Round(
            bucket=bucket,
            seq_lens=several(0, geometry.context),
            requests=several(0, geometry.request_rows - 1),
            lens={"extend_lens": several(0, geometry.draft_tokens)} if ragged else verified(),
            remap=remap,
            prefixes=tuple(
                (row, draw(rows), draw(st.integers(1, geometry.pages_per_row)))
                for row in dict.fromkeys(remap)
                if row % 2
            ),
            poison=draw(st.sampled_from(POISONS)),
            twice=draw(st.booleans()),
            foreign=draw(st.booleans()),
            seed=draw(st.integers(0, SEED_LIMIT - 1)) if system == "dcp" else 0,
        )

    return Scenario(
        system=system,
        geometry=geometry,
        buckets=buckets,
        rounds=tuple(round_(bucket) for bucket in draw(st.lists(st.sampled_from(buckets), max_size=4))),
        seed=draw(st.integers(0, 2**63 - 1)),
        subject=draw(st.none() | st.text(max_size=9)),
        fault=draw(st.none() | st.text(max_size=9)),
        found=draw(st.none() | st.text(max_size=9)),
    )


@given(scenarios())
def test_a_written_case_reads_back_equal(scenario: Scenario):
    text = scenario.to_json()
    assert parse_case(text) == scenario
    assert text.isascii()
    assert text.endswith("\n")
    # One line a round, so that a person can cut a case down with an editor.
    assert sum(line.startswith('    {"bucket": ') for line in text.splitlines()) == len(scenario.rounds)


def test_a_case_file_is_named_after_its_file(tmp_path: Path):
    path = tmp_path / "stale-page.json"
    path.write_text(json.dumps(valid()), encoding="utf-8")
    assert read_case(path) == parse_case(json.dumps(valid()), name="stale-page")


def test_floors_are_said_by_each_round_or_by_the_geometry_for_all():
    case = valid()
    with_floors(case)
    case["geometry"]["replay_floor"] = 5
    scenario = parse_case(json.dumps(case))
    assert [round_.lens.get("replay_floors") for round_ in scenario.rounds] == [(0, 9, 4), None]
    assert parse_case(scenario.to_json()) == scenario
    generations = np.zeros(scenario.geometry.request_rows, np.int64)
    table = tabulate(SYSTEMS["padded"], scenario.geometry, scenario.rounds, generations, widest_bucket=4)
    assert table.lens["replay_floors"].tolist() == [[0, 9, 4, 5], [5, 5, 5, 5]], "pad rows keep the one number"
    assert [round_.replay_floors for round_ in table.rounds()] == [(0, 9, 4), (5,)]


def test_optional_keys_have_the_documented_defaults():
    case = valid()
    for key in ("geometry", "seed"):
        del case[key]
    del case["rounds"][0]["remap"], case["rounds"][0]["poison"]
    scenario = parse_case(json.dumps(case))
    assert scenario == Scenario(
        system="draft_extend",
        geometry=Geometry.resolve("deepseek_v32"),
        buckets=(2, 4),
        rounds=(
            Round(bucket=4, seq_lens=(7, 8, 9), requests=(1, 2, 3)),
            Round(bucket=2, seq_lens=(1,), requests=(0,), poison="stale", twice=True),
        ),
    )


def valid() -> dict[str, Any]:
    return {
        "schema": 1,
        "system": "draft_extend",
        "preset": "deepseek_v32",
        "geometry": {"draft_tokens": 4, "indexer": False},
        "buckets": [2, 4],
        "seed": 5,
        "rounds": [
            {"bucket": 4, "seq_lens": [7, 8, 9], "requests": [1, 2, 3], "remap": [3], "poison": "loud"},
            {"bucket": 2, "seq_lens": [1], "requests": [0], "poison": "stale", "twice": True},
        ],
    }


def with_floors(case: dict[str, Any]) -> None:
    case["system"], case["geometry"]["request_floors"] = "padded", True
    case["rounds"][0]["replay_floors"] = [0, 9, 4]


Edit = Callable[[dict[str, Any]], object]


def put(*path_and_value: Any) -> Edit:
    """Sets the value at a path; `put("rounds", 0, "bucket", 3)`."""
    *path, last, value = path_and_value

    def edit(case: dict[str, Any]) -> None:
        target: Any = case
        for step in path:
            target = target[step]
        target[last] = value

    return edit


def delete(*path: Any) -> Edit:
    *way, last = path

    def edit(case: dict[str, Any]) -> None:
        target: Any = case
        for step in way:
            target = target[step]
        del target[last]

    return edit


ROUND_KEYS = "bucket, seq_lens, requests, extend_lens, remap, prefixes, poison, twice, foreign, seed"
TOP_KEYS = "schema, system, preset, geometry, buckets, seed, subject, fault, found, rounds"
GEOMETRY_KEYS = ", ".join(SHARED_FIELDS)

BAD_EDITS: dict[str, tuple[Edit, str]] = {
    "wrong type": (put("rounds", {}), "rounds: an object is not a list; write a list"),
    "string for an integer": (
        put("rounds", 0, "seq_lens", ["7", 8, 9]),
        'rounds[0].seq_lens[0]: "7" is not an integer; write an integer',
    ),
    "float for an integer": (put("seed", 1.0), "seed: 1.0 is not an integer; write an integer"),
    "true for an integer": (put("buckets", [2, True]), "buckets[1]: true is not an integer; write an integer"),
    "null for a list": (put("buckets", None), "buckets: null is not a list; write a list"),
    "null for an optional key": (put("found", None), "found: null is not a string; write a string"),
    "integer for a boolean": (
        put("rounds", 1, "twice", 1),
        "rounds[1].twice: 1 is not true or false; write true or false",
    ),
    "list for a round": (put("rounds", 1, [[1]]), "rounds[1]: a list is not an object; write {...}"),
    "NaN": (
        put("rounds", 0, "seq_lens", 1, float("nan")),
        "rounds[0].seq_lens[1]: NaN is not an integer; write an integer",
    ),
    "infinity": (put("seed", float("inf")), "seed: Infinity is not an integer; write an integer"),
    "long string": (
        put("system", "d" * 90),
        f'system: "{"d" * 36}... is unknown; use one of {", ".join(SYSTEMS)}',
    ),
    "unknown key": (put("colour", 1), f'"colour" is an unknown key; known keys here: {TOP_KEYS}'),
    "unknown key of a round": (
        put("rounds", 0, "lens", [1]),
        f'rounds[0]: "lens" is an unknown key; known keys here: {ROUND_KEYS}',
    ),
    "key of two lines": (put("a\nb\ud800", 1), f'"a\\nb\\ud800" is an unknown key; known keys here: {TOP_KEYS}'),
    "missing key": (delete("rounds", 1, "seq_lens"), "rounds[1].seq_lens: missing; add a list"),
    "missing schema": (delete("schema"), "schema: missing; add an integer"),
    "wrong schema": (put("schema", 2), "schema: 2 is not 1, the one this version reads; update dsa-verify"),
    "newer schema with newer keys": (
        lambda case: case.update(schema=2, colour=1),
        "schema: 2 is not 1, the one this version reads; update dsa-verify",
    ),
    "unknown system": (
        put("system", "prefill"),
        'system: "prefill" is unknown; use one of decode, target_verify, draft_extend, ragged_verify, padded, dcp, mtp',
    ),
    "unknown preset": (
        put("preset", "gpt"),
        f'preset: "gpt" is unknown; use one of {", ".join(PRESETS)}',
    ),
    "unknown geometry": (
        put("geometry", {"colour\n": 1}),
        f"geometry.'colour\\n': unknown geometry field; known fields: {GEOMETRY_KEYS}",
    ),
    "preset in the geometry": (
        put("geometry", {"preset": "tiny"}),
        f"geometry.'preset': unknown geometry field; known fields: {GEOMETRY_KEYS}",
    ),
    "size of another system": (
        put("geometry", {"dcp_size": 2}),
        "geometry.dcp_size: is a size of dcp alone; leave it out, or choose that system",
    ),
    "geometry value of wrong type": (
        put("geometry", "context", "4096"),
        "geometry.context: '4096' is str; it must be int",
    ),
    "geometry value out of range": (
        put("geometry", "draft_tokens", 17),
        "geometry.draft_tokens: 17 is outside 1..16; choose a value inside",
    ),
    "draft in decode": (
        lambda case: case.update(system="decode"),
        "geometry.draft_tokens: 4 has no effect in decode; remove it",
    ),
    "no buckets": (put("buckets", []), "buckets: the list is empty; name at least one bucket"),
    "bucket named twice": (put("buckets", [2, 4, 2]), "buckets: [2, 4, 2] names a bucket twice; name each once"),
    "bucket of zero": (put("buckets", [0]), "buckets[0]: 0 is below 1; use 1..16384"),
    "bucket not captured": (
        put("rounds", 1, "bucket", 3),
        "rounds[1].bucket: 3 is not captured; buckets are [2, 4], add it there",
    ),
    "bucket smaller than the raw batch": (
        put("rounds", 0, "bucket", 2),
        "rounds[0].seq_lens: raw batch 3 exceeds bucket 2; use a larger bucket",
    ),
    "length beyond the context": (
        lambda case: case["rounds"].extend([{**case["rounds"][1]}, {**case["rounds"][0], "seq_lens": [1, 2, 140_000]}]),
        "rounds[3].seq_lens[2]: 140000 exceeds context 131072; use 0..131072",
    ),
    "negative length": (
        put("rounds", 0, "seq_lens", 0, -1),
        "rounds[0].seq_lens[0]: -1 is below 0; use 0..131072",
    ),
    "huge length": (
        put("rounds", 0, "seq_lens", 0, 10**20),
        "rounds[0].seq_lens[0]: 100000000000000000000 exceeds context 131072; use 0..131072",
    ),
    "huge seed": (put("seed", 2**63), f"seed: {2**63} exceeds the limit {2**63 - 1}; use 0..{2**63 - 1}"),
    "request row out of range": (
        put("rounds", 0, "requests", 2, 97),
        "rounds[0].requests[2]: 97 exceeds the last request row 96; use 0..96",
    ),
    "too few requests": (
        put("rounds", 0, "requests", [1]),
        "rounds[0].requests: 1 entries for 3 seq_lens; give one a request",
    ),
    "remap of row 0": (put("rounds", 0, "remap", [0]), "rounds[0].remap[0]: 0 is below 1; use 1..96"),
    "prefix that is no triple": (
        put("rounds", 0, "prefixes", [[3, 1]]),
        "rounds[0].prefixes[0]: a list is not three integers; write [row, origin row, pages]",
    ),
    "prefix of a row that stays": (
        put("rounds", 0, "prefixes", [[2, 1, 1]]),
        "rounds[0].prefixes[0]: row 2 does not move in this round; name it in remap, too",
    ),
    "prefix from the pad request": (
        put("rounds", 0, "prefixes", [[3, 0, 1]]),
        "rounds[0].prefixes[0][1]: 0 is below 1; use 1..96",
    ),
    "prefix of no page": (
        put("rounds", 0, "prefixes", [[3, 1, 0]]),
        "rounds[0].prefixes[0][2]: 0 is below 1; use 1..2050",
    ),
    "prefix longer than a row": (
        put("rounds", 0, "prefixes", [[3, 1, 2051]]),
        "rounds[0].prefixes[0][2]: 2051 exceeds the pages of a row 2050; use 1..2050",
    ),
    "two prefixes of one row": (
        put("rounds", 0, "prefixes", [[3, 1, 1], [3, 2, 1]]),
        "rounds[0].prefixes[1]: row 3 takes a second prefix; give each row one",
    ),
    "extend_lens beyond the draft": (
        put("rounds", 1, "extend_lens", [5]),
        "rounds[1].extend_lens[0]: 5 exceeds draft_tokens 4; use 0..4",
    ),
    "replay_floors outside padded": (
        put("rounds", 0, "replay_floors", [1, 2, 3]),
        "rounds[0].replay_floors: has no effect in draft_extend; remove it",
    ),
    "replay_floors of a run that has one for all": (
        lambda case: (put("system", "padded")(case), put("rounds", 0, "replay_floors", [1, 2, 3])(case)),
        "rounds[0].replay_floors: needs geometry.request_floors; set it",
    ),
    "too few replay_floors": (
        lambda case: (with_floors(case), put("rounds", 0, "replay_floors", [1])(case)),
        "rounds[0].replay_floors: 1 entries for 3 seq_lens; give one a request",
    ),
    "a floor beyond the context": (
        lambda case: (with_floors(case), put("rounds", 0, "replay_floors", [1, 2, 131_073])(case)),
        "rounds[0].replay_floors[2]: 131073 exceeds context 131072; use 0..131072",
    ),
    "two floors of one request": (
        lambda case: (with_floors(case), put("rounds", 0, "requests", [3, 1, 3])(case)),
        "rounds[0].replay_floors: two batch rows of one request have different values, which belong to its row; "
        "give both the same",
    ),
    "too few extend_lens": (
        put("rounds", 0, "extend_lens", [4]),
        "rounds[0].extend_lens: 1 entries for 3 seq_lens; give one a request",
    ),
    "extend_lens outside draft_extend": (
        lambda case: (put("system", "target_verify")(case), put("rounds", 1, "extend_lens", [4])(case)),
        "rounds[1].extend_lens: has no effect in target_verify; remove it",
    ),
    "unknown poison": (
        put("rounds", 0, "poison", "arsenic"),
        'rounds[0].poison: "arsenic" is unknown; use one of loud, plausible, stale',
    ),
    "too many entries": (
        put("rounds", 0, "seq_lens", [1] * 40_000),
        "rounds[0].seq_lens: 40000 entries exceed 32769; shorten the list",
    ),
}


@pytest.mark.parametrize("edit, message", BAD_EDITS.values(), ids=BAD_EDITS)
def test_a_wrong_case_is_refused_in_one_line(edit: Edit, message: str):
    case = valid()
    parse_case(json.dumps(case))  # so that the edit alone is to blame
    edit(case)
    with pytest.raises(UsageError) as caught:
        parse_case(json.dumps(case))
    assert str(caught.value) == message


BAD_TEXTS = {
    "empty": ("", "not JSON (Expecting value: line 1 column 1 (char 0)); a case is the text that a finding wrote"),
    "cut off": (
        '{"schema": 1, "seed"',
        "not JSON (Expecting ':' delimiter: line 1 column 21 (char 20)); a case is the text that a finding wrote",
    ),
    "list": ("[]", "the case: a list is not an object; write {...}"),
    "number": ("7", "the case: 7 is not an object; write {...}"),
    "byte order mark": (
        "\ufeff{}",
        "not JSON (it begins with a byte order mark); save it as UTF-8 without one",
    ),
    "deep nesting": (
        "[" * 200_000,
        "not a case (it nests too deeply); a case is the text that a finding wrote",
    ),
    "deep nesting in a field": (
        '{"schema": ' + "[" * 200 + "]" * 200 + "}",
        "schema: a list is not an integer; write an integer",
    ),
    "key twice": (
        '{"schema": 1, "seed": 1, "seed": 2}',
        '"seed": the key is given twice in one object; keep one',
    ),
    "integer of 5000 digits": (
        '{"schema": 1, "seed": ' + "9" * 5000 + "}",
        f"{'9' * 37}...: an integer of 5000 characters exceeds 32; shorten it",
    ),
}


@pytest.mark.parametrize("text, message", BAD_TEXTS.values(), ids=BAD_TEXTS)
def test_a_text_that_is_no_case_is_refused_in_one_line(text: str, message: str):
    with pytest.raises(UsageError) as caught:
        parse_case(text)
    assert str(caught.value) == message


def test_an_unreadable_file_is_refused_with_its_path(tmp_path: Path):
    binary = tmp_path / "binary.json"
    binary.write_bytes(b"\x93NUMPY\x00\xff")
    wrong = tmp_path / "wrong.json"
    wrong.write_text("[]", encoding="utf-8")
    remedy = "give the path of a JSON text"
    for path, reason in {
        tmp_path / "missing.json": f"cannot be read as a case file (No such file or directory); {remedy}",
        tmp_path: f"cannot be read as a case file (Is a directory); {remedy}",
        binary: f"cannot be read as a case file (it is not UTF-8 text); {remedy}",
        wrong: "the case: a list is not an object; write {...}",
    }.items():
        with pytest.raises(UsageError) as caught:
            read_case(path)
        assert str(caught.value) == f"{path}: {reason}"


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
PLACES = [(key,) for key in valid()] + [("subject",), ("geometry", "context"), ("geometry", "token_table_width")]
PLACES += [("rounds", 0, key) for key in ROUND_KEYS.split(", ")] + [("rounds", 0, "seq_lens", 1)]


@settings(max_examples=500)
@given(st.sampled_from(PLACES), JSON_VALUES)
def test_any_value_anywhere_is_read_or_refused_in_one_line(place: tuple[Any, ...], value: Any):
    case = valid()
    put(*place, value)(case)
    refusal = ""
    try:
        scenario = parse_case(json.dumps(case))
    except UsageError as error:
        refusal = str(error)
    if not refusal:
        assert parse_case(scenario.to_json()) == scenario
    assert len(refusal.splitlines()) <= 1
    assert len(refusal) < 500
