"""The reader of our own JSON: what a schema takes, and that every other content is one kind of error."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertrain.base.schema import Count, Finite, JsonError, Name, check_value, is_number, load_json, parse_json


class Span(NamedTuple):
    path: str
    start: int


@dataclass(frozen=True)
class Inner:
    name: str
    loss: float = 1.0


@dataclass(frozen=True)
class Outer:
    step: Count
    place: Path
    kind: Literal["a", "b"]
    inner: tuple[Inner, ...] = ()
    spans: list[list[Span]] = field(default_factory=list)
    pairs: tuple[tuple[str, str], ...] = ()
    metrics: dict[str, float] = field(default_factory=dict)
    maybe: int | None = None
    optional: float | None = None


WHOLE: dict[str, Any] = {
    "step": 3,
    "place": "/a",
    "kind": "a",
    "inner": [{"name": "x", "loss": None}, {"name": "y", "newer": 1}],
    "spans": [[["f", 1], ["g", 2]]],
    "pairs": [["k", "v"]],
    "metrics": {"loss": 1, "bad": None},
    "maybe": None,
    "newer key": {"anything": []},
}


def test_an_object_is_made_of_json() -> None:
    made = parse_json(json.dumps(WHOLE), Outer)
    assert (made.step, made.place, made.kind, made.maybe, made.optional) == (3, Path("/a"), "a", None, None)
    assert math.isnan(made.inner[0].loss)
    assert made.inner[1] == Inner("y")
    assert made.spans == [[Span("f", 1), Span("g", 2)]]
    assert made.pairs == (("k", "v"),)
    assert made.metrics["loss"] == 1.0
    assert math.isnan(parse_json('{"x": 1e999}', dict[str, float])["x"])


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"step": -1}, "step is -1"),
        ({"step": True}, "step is True"),
        ({"step": 1.0}, "step is 1.0"),
        ({"step": None}, "step is None"),
        ({"step": 2**63}, "step is 9"),
        ({"step": 2**53 + 1}, "step is 9"),
        ({"kind": "c"}, "kind is 'c'"),
        ({"place": 1}, "place is 1"),
        ({"place": "x" * 256}, "place is 'x"),
        ({"place": "x/" * 2001}, "place is 'x"),
        ({"place": "\0"}, "place is"),
        ({"place": "\ud800"}, "place is"),
        ({"inner": [{"loss": 1}]}, "inner[0].name is missing"),
        ({"inner": [{"name": "x"}, []]}, "inner[1] is list"),
        ({"spans": [[["f"]]]}, "spans[0][0].start is missing"),
        ({"pairs": [["k"]]}, "pairs[0] is list"),
        ({"metrics": {"loss": "1"}}, "metrics.loss is '1'"),
        ({"maybe": "x"}, "maybe is 'x'"),
    ],
)
def test_a_value_of_another_kind_is_named(change: dict[str, Any], where: str) -> None:
    with pytest.raises(JsonError) as caught:
        parse_json(json.dumps(WHOLE | change), Outer)
    assert str(caught.value).startswith(where)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[" * 100_000, "[" * 60 + "]" * 60, "9" * 5000, "9" * 301, '{"a":' * 60 + "1" + "}" * 60, b"\xff", b"\0"],
)
def test_what_is_not_json_of_ours_is_refused(text: str | bytes) -> None:
    with pytest.raises(JsonError):
        parse_json(text)


def test_a_dict_as_a_schema_keeps_other_keys(tmp_path: Path) -> None:
    (tmp_path / "x").write_text('{"files": [{"bytes": 1, "other": 2}], "more": 3}')
    schema = {"files": [{"bytes": Count, "name?": str}], "rows?": Count}
    assert load_json(tmp_path / "x", schema) == {"files": [{"bytes": 1, "other": 2}], "more": 3}
    with pytest.raises(JsonError, match="files is missing"):
        check_value({}, schema)
    with pytest.raises(JsonError, match="it is list"):
        check_value([], schema)
    with pytest.raises(OSError, match="nothing"):
        load_json(tmp_path / "nothing", schema)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a", "a/", "\0", "\ud800", "x" * 256, "ä" * 128, 1, None])
def test_a_name_is_that_of_a_file_in_the_folder(name: object) -> None:
    assert check_value("shard-0.arrow", Name) == "shard-0.arrow"
    with pytest.raises(JsonError):
        check_value(name, Name)


@pytest.mark.parametrize("value", [None, math.nan, math.inf, 1e38, "1", True])
def test_a_finite_number_is_not_null(value: object) -> None:
    assert check_value(1, Finite) == 1.0
    with pytest.raises(JsonError):
        check_value(value, Finite)


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inside: st.lists(inside) | st.dictionaries(st.sampled_from([*WHOLE, "name", "loss"]) | st.text(), inside),
)


@given(ANY_JSON)
def test_any_json_is_an_object_or_one_error(content: Any) -> None:
    for value in (content, WHOLE | content if isinstance(content, dict) else content):
        try:
            assert isinstance(parse_json(json.dumps(value), Outer), Outer)
        except JsonError:
            continue


@pytest.mark.parametrize(
    ("value", "expected"),
    [(1, True), (1.5, True), (True, False), ("1", False), (math.inf, False), (math.nan, False), (10**400, False)],
)
def test_numbers_are_finite_and_fit_in_64_bits(value: object, expected: bool) -> None:
    assert is_number(value) is expected
