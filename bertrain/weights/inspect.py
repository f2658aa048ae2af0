"""`bertrain weights show` and `compare`: list the tensors of a file, and compare two."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from bertrain.base.errors import UserError
from bertrain.weights.huggingface import model_config
from bertrain.weights.names import adapt_to_head
from bertrain.weights.source import open_source, read_weights
from bertrain.weights.tensors import PADDED_BY_VOCABULARY, Kind, Weights, expected_shapes, is_padded

Verdict = Literal["equal", "close", "different", "only in A", "only in B"]


@dataclass(frozen=True)
class ShownTensor:
    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    ours: str | None  # None if our model has no such parameter
    is_skipped: bool  # whether it is known not to be a weight: optimizer state, a counter, a constant


@dataclass(frozen=True)
class Shown:
    """The contents of a file or folder of weights, without the values of tensors."""

    kind: Kind
    origin: str
    global_step: int | None
    config: dict[str, object] | None
    head: str | None  # a value of `model.head`; None without a config
    labels: tuple[str, ...]  # class names of a fine-tuned head
    words: int | None  # size of its vocabulary
    parameters: int  # number of parameters; a tensor stored twice counts once, optimizer state not at all
    nbytes: int  # of all tensors
    tensors: tuple[ShownTensor, ...]
    missing: tuple[str, ...] | None
    """Tensors of a model with both heads that it lacks, by our names; None without a config."""


@dataclass(frozen=True)
class Compared:
    name: str
    verdict: Verdict
    largest_absolute: float | None = None
    largest_relative: float | None = None  # of |a - b| over the larger of |a| and |b|


def show_weights(source: str | Path) -> Shown:
    """List the tensors, config and vocabulary of a run, or of a folder or file of weights."""
    opened = open_source(source)
    placed = {stored.place: stored for stored in opened.tensors if stored.place is not None}
    whole = {place.parameter for place in placed if place.third < 0}
    counted = [stored for place, stored in placed.items() if place.third < 0 or place.parameter not in whole]
    missing = None
    if opened.settings is not None:
        thirds = Counter(place.parameter for place in placed if place.third >= 0)
        head, family = opened.settings.head, opened.settings.family
        found = {adapt_to_head(place, head, family).parameter for place in placed if place.third < 0}
        found |= {name for name, number in thirds.items() if number == 3}
        missing = tuple(name for name in expected_shapes(opened, opened.settings) if name not in found)
    return Shown(
        kind=opened.kind,
        origin=opened.origin,
        global_step=opened.global_step,
        config=model_config(opened.settings) if opened.settings else None,
        head=opened.settings.head if opened.settings else None,
        labels=opened.labels,
        words=len(opened.vocabulary.words) if opened.vocabulary else None,
        parameters=sum(math.prod(stored.shape) for stored in counted),
        nbytes=sum(stored.nbytes for stored in opened.tensors),
        tensors=tuple(
            ShownTensor(one.name, one.shape, one.dtype, one.nbytes, one.place and one.place.parameter, one.is_skipped)
            for one in opened.tensors
        ),
        missing=missing,
    )


def compare_weights(a: str | Path, b: str | Path, *, tolerance: float = 0.0) -> list[Compared]:
    """Compare two sources of weights by our tensor names, without vocabulary padding.

    A tensor is equal (every value), close (no value differs by more than `tolerance`) or different.
    """
    if not tolerance >= 0:
        raise UserError("bad-tolerance", f"--tolerance is {tolerance}; it must be 0 or more")
    one, other = read_weights(a), read_weights(b)
    names = dict.fromkeys([*one.tensors, *other.tensors])
    return [_compare(name, *_without_padding(one, other, name), tolerance) for name in names]


def is_same(compared: list[Compared]) -> bool:
    return all(tensor.verdict in ("equal", "close") for tensor in compared)


def _without_padding(one: Weights, other: Weights, name: str) -> tuple[Tensor | None, Tensor | None]:
    """A tensor of both sources without the rows after the smaller vocabulary, if these are padding."""
    a, b = one.tensors.get(name), other.tensors.get(name)
    if a is None or b is None or name not in PADDED_BY_VOCABULARY:
        return a, b
    fewer, more = sorted(len(of.vocabulary.words) if of.vocabulary else of.settings.vocab_size for of in (one, other))
    return (a[:fewer], b[:fewer]) if is_padded(fewer, more) else (a, b)


def _compare(name: str, a: Tensor | None, b: Tensor | None, tolerance: float) -> Compared:
    if a is None or b is None:
        return Compared(name, "only in B" if a is None else "only in A")
    if a.shape != b.shape:
        return Compared(name, "different")
    if torch.equal(a, b):
        return Compared(name, "equal", 0.0, 0.0)
    difference = (a.double() - b.double()).abs()
    difference[(a == b) | (a.isnan() & b.isnan())] = 0.0  # equal infinities, and NaN on both sides
    scale = torch.maximum(a.double().abs(), b.double().abs()).clamp(min=1e-300)
    absolute, relative = (float(part.nan_to_num(nan=math.inf).max()) for part in (difference, difference / scale))
    return Compared(name, "close" if absolute <= tolerance else "different", absolute, relative)
