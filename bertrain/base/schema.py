"""Reads JSON that bertrain wrote and checks it against a schema: every damage is one exception, `JsonError`.

A schema is a type (int, float, str, bool, Path, Any, `X | None`, Literal, list[X], tuple[X, ...], dict[str, X]),
`Count`, `Finite`, `Name`, a dataclass or NamedTuple, of which an object is made, a dict of schemas by key, where
`"key?"` may be missing, or a list of the schema of its items. Unknown keys are ignored, and fields with a default may
be missing: older and newer files can be read. A float that is null or not finite is NaN: a number that is not finite
is written as null. A path that no system call accepts, since it is too long or has a null byte, is refused.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, NoReturn, TypeGuard, Union, get_args, get_origin, get_type_hints

MAX_DEPTH, MAX_DIGITS = 50, 300  # the digits that a float can hold
INT64 = range(-(2**63), 2**63)
MAX_COUNT = 2**53  # larger ones are not exact as floats
MAX_NUMBER = 1e37  # the sum of a few stays finite in single precision
MAX_NAME, MAX_PATH = 255, 4000  # bytes; Linux takes a path of 4095, and files in it have names
Count = Annotated[int, "at least 0"]
Finite = Annotated[float, "not null"]
Name = Annotated[str, "of a file in the folder"]


class JsonError(ValueError):
    """Text is not JSON, or not what its schema says; the message says where."""


def load_json(path: Path, schema: Any = Any) -> Any:
    """The content of a JSON file; raises OSError or JsonError."""
    return parse_json(path.read_bytes(), schema)


def parse_json(text: str | bytes, schema: Any = Any) -> Any:
    try:
        text = text if isinstance(text, str) else text.decode()
        content = json.loads(text, parse_int=_parse_int)
    except (ValueError, RecursionError) as error:
        raise JsonError(f"not JSON: {error}") from None
    if text.count("[") + text.count("{") > MAX_DEPTH:
        _refuse_depth(content)
    return check_value(content, schema)


def _parse_int(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number has {len(digits)} digits")
    return int(digits)


def _refuse_depth(content: Any, depth: int = 0) -> None:
    if depth > MAX_DEPTH:
        raise JsonError("it is nested too deeply")
    for one in content.values() if isinstance(content, dict) else content if isinstance(content, list) else ():
        if isinstance(one, dict | list):
            _refuse_depth(one, depth + 1)


def is_number(value: object) -> TypeGuard[float]:
    """Whether it is a finite number whose sums are finite too, and an integer fits in 64 bits."""
    return (type(value) is int and value in INT64) or (type(value) is float and abs(value) <= MAX_NUMBER)


def _is_path(text: str) -> bool:
    try:
        path = os.fsencode(text)
    except UnicodeEncodeError:
        return False
    return b"\0" not in path and len(path) <= MAX_PATH and max(map(len, path.split(b"/"))) <= MAX_NAME


def check_value(value: Any, schema: Any, where: str = "") -> Any:
    """A parsed value as its schema says; raises JsonError."""
    if schema is Any:
        return value
    if schema is Path or schema is Name:
        if not _is_path(_expect(value, str, where)) or (schema is Name and ("/" in value or value in ("", ".", ".."))):
            _refuse(value, where, "a path" if schema is Path else "the name of a file")
        return Path(value) if schema is Path else value
    if schema is Finite:
        return float(value) if is_number(value) else _refuse(value, where, "a number")
    if schema is float:
        if value is not None and type(value) is not float and not is_number(value):
            _refuse(value, where, "a number")
        return float(value) if is_number(value) else math.nan
    if schema is int or schema is Count:
        is_int = type(value) is int and (value in INT64 if schema is int else 0 <= value <= MAX_COUNT)
        return value if is_int else _refuse(value, where, "a whole number" if schema is int else "a count")
    if isinstance(schema, dict):
        return _expect(value, dict, where) | _check_keys(value, schema, where)
    if dataclasses.is_dataclass(schema):
        made: Any = schema
        return made(**_check_keys(_expect(value, dict, where), _keys_of(made), where))
    if hasattr(schema, "_fields"):  # a NamedTuple, which is written as a list
        named = dict(zip(schema._fields, _expect(value, list, where), strict=False))
        return schema(**_check_keys(named, get_type_hints(schema), where))
    kind, inside = (list, tuple(schema)) if isinstance(schema, list) else (get_origin(schema), get_args(schema))
    if kind in (list, tuple):
        if kind is tuple and inside[-1] is not Ellipsis and len(_expect(value, list, where)) != len(inside):
            _refuse(value, where, f"a list of {len(inside)}")
        items = enumerate(_expect(value, list, where))
        return kind(check_value(one, inside[0], f"{where}[{number}]") for number, one in items)
    if kind is dict:
        items = _expect(value, dict, where).items()
        return {name: check_value(one, inside[1], f"{where}.{name}") for name, one in items}
    if kind is Literal:
        return value if value in inside else _refuse(value, where, f"one of {inside}")
    if kind in (Union, UnionType):  # `X | None`: a float that is null is NaN, not None
        return None if value is None and float not in inside else check_value(value, inside[0], where)
    return _expect(value, schema, where)


def _expect(value: Any, kind: type, where: str) -> Any:
    is_expected = type(value) is kind or (kind is list and type(value) is tuple)
    return value if is_expected else _refuse(value, where, kind.__name__)


def _refuse(value: Any, where: str, wanted: str) -> NoReturn:
    shown = type(value).__name__ if isinstance(value, dict | list) else repr(value)[:40]
    raise JsonError(f"{where.lstrip('.') or 'it'} is {shown}, not {wanted}")


def _check_keys(value: dict[str, Any], schema: dict[str, Any], where: str) -> dict[str, Any]:
    found = {}
    for key, kind in schema.items():
        name = key.removesuffix("?")
        if name in value:
            found[name] = check_value(value[name], kind, f"{where}.{name}")
        elif name == key:
            raise JsonError(f"{where}.{name}".lstrip(".") + " is missing")
    return found


@cache
def _keys_of(schema: Any) -> dict[str, Any]:
    """The fields of a dataclass as a schema of keys."""
    hints = get_type_hints(schema, include_extras=True)
    required = {one.name for one in dataclasses.fields(schema) if one.default is one.default_factory}  # both missing
    return {one.name + "?" * (one.name not in required): hints[one.name] for one in dataclasses.fields(schema)}
