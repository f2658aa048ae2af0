"""Reads JSON that bertrain wrote and checks it against a schema: every damage is one exception, `JsonError`.

A schema is a type: int, float, str, bool, Any or object, `X | Y`, Literal, Annotated[int, least], list[X],
dict[str, X], tuple[X, ...], a dataclass or NamedTuple (made), or a TypedDict (stays a dict). Keys with a default (or
NotRequired) may be missing, and unknown keys are ignored: older and newer files can be read. A float that is null or
not finite is NaN, as a number that is not finite is written as null.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NotRequired,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

T = TypeVar("T")

MAX_DEPTH = 50
"""Of nested lists and objects where a schema has Any; ours have fewer than ten."""
INT64, UINT64 = range(-(2**63), 2**63), range(2**64)

Count = Annotated[int, 0]
"""An int of at least 0."""
Check = Callable[[Any, str], Any]
"""Returns a value as its type, or raises JsonError with the place of the value."""


class JsonError(ValueError):
    """Text is not JSON, or not what its schema says; the message says where."""


def load_json(path: Path, schema: type[T]) -> T:
    """The content of a JSON file; raises OSError or JsonError."""
    return parse_json(path.read_bytes(), schema)


def parse_json(text: str | bytes, schema: type[T]) -> T:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:  # also bytes that are not UTF-8, and numbers of thousands of digits
        raise JsonError(f"not JSON: {error}") from None
    return check_value(content, schema)


def check_value(value: Any, schema: type[T]) -> T:
    """A value that was parsed elsewhere, such as a row of a table, as its schema says; raises JsonError."""
    result: T = _checker(schema)(value, "")  # type: ignore[arg-type]  # a type is hashable
    return result


@cache
def _checker(schema: Any) -> Check:
    kind, inside = get_origin(schema), get_args(schema)
    if kind is Annotated:
        return _at_least(inside[1])
    if kind is NotRequired:
        return _checker(inside[0])
    if kind is Literal:
        return lambda value, where: value if value in inside else _refuse(value, where, f"one of {inside}")
    if kind in (Union, UnionType):
        return _any_of([_checker(one) for one in sorted(inside, key=lambda one: one is not float)])  # null: NaN
    if kind in (list, tuple):
        return _items(kind, _checker(inside[0]), 0 if kind is list or inside[-1] is Ellipsis else len(inside))
    if kind is dict:
        return _values(_checker(inside[1]))
    if dataclasses.is_dataclass(schema) or is_typeddict(schema) or hasattr(schema, "_field_defaults"):
        return _object(schema)
    return {Any: _shallow, object: _shallow, float: _float, int: _at_least(INT64.start)}.get(schema) or _exactly(schema)


def _refuse(value: Any, where: str, wanted: str) -> Any:
    shown = "an object" if isinstance(value, dict) else "a list" if isinstance(value, list) else repr(value)[:40]
    raise JsonError(f"{where.lstrip('.') or 'it'} is {shown}, not {wanted}")


def _exactly(schema: type) -> Check:
    return lambda value, where: value if type(value) is schema else _refuse(value, where, schema.__name__)


def _at_least(least: int) -> Check:
    wanted = f"a whole number of at least {least}" if least > INT64.start else "a whole number"

    def check(value: Any, where: str) -> Any:
        return value if type(value) is int and least <= value < INT64.stop else _refuse(value, where, wanted)

    return check


def _float(value: Any, where: str) -> Any:
    if value is None or type(value) is float:
        return value if value is not None and math.isfinite(value) else math.nan
    return float(value) if type(value) is int and value in INT64 else _refuse(value, where, "a number")


def _shallow(value: Any, where: str, depth: int = 0) -> Any:
    """Any JSON whose nesting and numbers no later code fails on."""
    if depth > MAX_DEPTH or (type(value) is int and value not in INT64 and value not in UINT64):
        raise JsonError(f"{where.lstrip('.') or 'it'} is nested too deeply, or has a number of too many digits")
    for one in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _shallow(one, where, depth + 1)
    return value


def _any_of(checks: list[Check]) -> Check:
    def check(value: Any, where: str) -> Any:
        for one in checks[:-1]:
            try:
                return one(value, where)
            except JsonError:
                continue
        return checks[-1](value, where)

    return check


def _items(kind: type, check_one: Check, length: int) -> Check:
    def check(value: Any, where: str) -> Any:
        if not isinstance(value, list | tuple) or length not in (0, len(value)):
            _refuse(value, where, f"a list{f' of {length}' if length else ''}")
        return kind(check_one(one, f"{where}[{number}]") for number, one in enumerate(value))

    return check


def _values(check_one: Check) -> Check:
    def check(value: Any, where: str) -> Any:
        if not isinstance(value, dict):
            _refuse(value, where, "an object")
        return {name: check_one(one, f"{where}.{name}") for name, one in value.items()}

    return check


def _object(schema: Any) -> Check:
    hints = get_type_hints(schema, include_extras=True)
    if is_typeddict(schema):
        optional = {name for name, hint in hints.items() if get_origin(hint) is NotRequired}
    elif dataclasses.is_dataclass(schema):
        own = dataclasses.fields(schema)
        optional = {
            one.name
            for one in own
            if one.default is not dataclasses.MISSING or one.default_factory is not dataclasses.MISSING
        }
        hints = {one.name: hints[one.name] for one in own}
    else:
        optional = set(schema._field_defaults)
    checks = {name: _checker(hint) for name, hint in hints.items()}

    def check(value: Any, where: str) -> Any:
        if isinstance(value, list) and hasattr(schema, "_fields"):  # as a NamedTuple is written
            value = dict(zip(hints, value, strict=False))
        if not isinstance(value, dict):
            _refuse(value, where, "an object")
        if missing := checks.keys() - optional - value.keys():
            raise JsonError(f"{where}.{min(missing)}".lstrip(".") + " is missing")
        found = {name: one(value[name], f"{where}.{name}") for name, one in checks.items() if name in value}
        if is_typeddict(schema):
            for name in value.keys() - found.keys():
                _shallow(value[name], f"{where}.{name}")
            return value | found
        return schema(**found)

    return check
