"""What every format of weights is opened as, and what it is read into."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from bertrain.base.errors import UserError
from bertrain.base.files import file_digest
from bertrain.config.settings import ModelSettings
from bertrain.data.text.vocabulary import Vocabulary
from bertrain.model.bert import Bert
from bertrain.weights.names import Place, for_head

Kind = Literal["run", "huggingface", "nvidia", "tf1"]
PADDED_BY_VOCABULARY = ("embeddings.words.weight", "masked_words.bias")
"""Tensors with a row for each word, which may have rows of padding after them."""
PADDINGS = (1, 8, 16, 32, 64)
"""Rows after the words are padding where they fill up to a multiple of one of these; else it is another vocabulary."""
PADDING_LIMIT = PADDINGS[-1]
NOT_PREDICTED = -10000.0
"""The bias of words that are padding, for programs that take them for words."""
MOST_LAYERS = 1000
"""A config that asks for more is damaged, and would take long to follow."""
ENCODER = ("embeddings.", "layers.")
NAMES_IN_A_SENTENCE = 8


@dataclass(frozen=True)
class Stored:
    """A tensor in somebody's file, not read yet."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    read: Callable[[], Tensor]
    place: Place | None = None
    """Where it goes in our model; None for what has no place there."""
    is_transposed: bool = False
    is_skipped: bool = False
    """Known, and no weight: an optimizer's state, a counter, a constant."""


@dataclass(frozen=True)
class Source:
    """A file or folder of weights, opened: what lies in it, under its own names."""

    kind: Kind
    origin: str
    fingerprint: Callable[[], str]
    tensors: tuple[Stored, ...]
    settings: ModelSettings | None
    """None where no config lies beside it."""
    vocabulary: Vocabulary | None = None
    global_step: int | None = None
    """Steps its training had made, where it says so."""
    labels: tuple[str, ...] = ()
    """Names of the classes that its head tells apart, where it says so."""


POSITIONS = "embeddings.positions.weight"
"""The tensor with a row for each position of a sequence."""


@dataclass(frozen=True)
class Weights:
    """Tensors under our names, the model they belong to, and the words they speak of."""

    origin: str
    fingerprint: str
    """SHA-256 of the file they were read from."""
    tensors: dict[str, Tensor]
    settings: ModelSettings
    vocabulary: Vocabulary | None
    left_over: tuple[str, ...] = ()
    """Tensors of the source that have no place in our model."""
    skipped: tuple[str, ...] = ()
    """Tensors of the source that are no weights: an optimizer's state, counters, constants."""
    kind: Kind = "run"
    global_step: int | None = None
    labels: tuple[str, ...] = ()
    """Names of the classes that the head tells apart, where they are known."""
    padding: int = 0
    """Rows after those of the config's words, which were left out."""
    thirds: tuple[str, ...] = ()
    """Queries, keys or values, of which the other two or one are not there; left over, therefore."""
    rounded: tuple[str, ...] = ()
    """Tensors of the source that had 64 bits a number."""

    @property
    def missing(self) -> list[str]:
        """Tensors of a model with its head, or with both of pre-training, that the source does not have."""
        return [name for name in parameter_shapes(replace(self.settings, nsp=True)) if name not in self.tensors]


def gather(source: Source) -> Weights:
    """Read a source's tensors into ours, in fp32; refuses tensors of a wrong shape, all of them by name."""
    if source.settings is None:
        raise UserError(
            f"no bert_config.json (or config.json) lies beside {source.origin}; put it there, or make a folder with "
            "`bertrain weights import --config FILE`"
        )
    shapes = expected_shapes(source, replace(source.settings, nsp=True))
    placed: dict[Place, tuple[str, Tensor]] = {}
    left_over: list[str] = []
    skipped: list[str] = []
    rounded: list[str] = []
    wrong: list[str] = []
    padding = 0
    for stored in source.tensors:
        place = stored.place and for_head(stored.place, source.settings.head)
        if place is None or place.ours not in shapes:
            (skipped if stored.is_skipped else left_over).append(stored.name)
            continue
        problem = _misfit(stored, place, shapes[place.ours], source.settings)
        if problem:
            wrong.append(problem)
        elif not wrong:
            _put(placed, place, stored, shapes[place.ours][0], source.origin)
            if stored.dtype == "float64":
                rounded.append(stored.name)
            if place.ours == PADDED_BY_VOCABULARY[0]:
                padding = stored.shape[0] - source.settings.vocab_size
    if wrong:
        raise UserError(f"the weights of {source.origin} do not fit its config: {', '.join(wrong)}")
    tensors, strays = _join(placed, source.origin)
    has_next_sentence = all(name in tensors for name in shapes if name.startswith("next_sentence."))
    weights = Weights(
        origin=source.origin,
        fingerprint=source.fingerprint(),
        tensors={name: tensors[name] for name in shapes if name in tensors},
        settings=replace(source.settings, nsp=has_next_sentence),
        vocabulary=source.vocabulary,
        left_over=tuple(sorted([*left_over, *strays])),
        skipped=tuple(sorted(skipped)),
        kind=source.kind,
        global_step=source.global_step,
        labels=source.labels,
        padding=padding,
        thirds=tuple(strays),
        rounded=tuple(rounded),
    )
    _check_vocabulary(weights)
    return weights


def _misfit(stored: Stored, place: Place, expected: tuple[int, ...], settings: ModelSettings) -> str:
    """What is wrong with a tensor, or nothing."""
    shape = stored.shape[::-1] if stored.is_transposed else stored.shape
    if place.third >= 0:
        expected = (expected[0] // 3, *expected[1:])
    if not stored.dtype.startswith(("float", "bfloat")):
        return f"{stored.name} is of type {stored.dtype}"
    if place.ours in PADDED_BY_VOCABULARY and len(shape) == len(expected):
        expected = (settings.vocab_size, *expected[1:])
        fits = is_padded(settings.vocab_size, shape[0]) and shape[1:] == expected[1:]
    else:
        fits = shape == expected
    wanted = expected[::-1] if stored.is_transposed else expected
    return "" if fits else f"{stored.name} is {stored.shape}, not {wanted}"


def _put(placed: dict[Place, tuple[str, Tensor]], place: Place, stored: Stored, rows: int, origin: str) -> None:
    """Read a tensor into its place, without rows of padding; what is there already must be the same."""
    tensor = stored.read().float()
    tensor = (tensor.t() if stored.is_transposed else tensor[:rows]).contiguous()
    if place in placed:
        _refuse_difference(placed[place], (stored.name, tensor), origin)
    placed[place] = (stored.name, tensor)


def _join(placed: dict[Place, tuple[str, Tensor]], origin: str) -> tuple[dict[str, Tensor], list[str]]:
    """Whole tensors by our name; and the names of thirds whose other thirds are not there."""
    tensors = {place.ours: tensor for place, (_, tensor) in placed.items() if place.third < 0}
    strays = []
    for ours in dict.fromkeys(place.ours for place in placed if place.third >= 0):
        thirds = {third: placed[Place(ours, third)] for third in range(3) if Place(ours, third) in placed}
        if ours in tensors:
            for third, found in thirds.items():
                whole = placed[Place(ours, -1)]
                _refuse_difference((whole[0], Place(ours, third).within(whole[1])), found, origin)
        elif len(thirds) == 3:
            tensors[ours] = torch.cat([tensor for _, tensor in thirds.values()])
        else:
            strays += [name for name, _ in thirds.values()]
    return tensors, strays


def _refuse_difference(one: tuple[str, Tensor], other: tuple[str, Tensor], origin: str) -> None:
    if not torch.equal(one[1], other[1]):
        raise UserError(
            f"{one[0]} and {other[0]} of {origin} are one tensor in a BERT and differ there; "
            "a model that keeps them apart is another model"
        )


def _check_vocabulary(weights: Weights) -> None:
    """A vocabulary may have a few words less than the model has rows, which are then padding; not more."""
    if weights.vocabulary is None:
        return
    words, rows = len(weights.vocabulary.words), weights.settings.vocab_size
    if not 0 <= rows - words < PADDING_LIMIT:
        raise UserError(
            f"the vocabulary of {weights.origin} has {words:,} words, and its model {rows:,}; "
            "one of vocab.txt and the config belongs to other weights"
        )


def expected_shapes(source: Source, settings: ModelSettings) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that the config beside a source asks for, unless it asks for nonsense."""
    if settings.num_layers <= MOST_LAYERS:
        try:
            return parameter_shapes(settings)
        except (RuntimeError, TypeError):  # sizes beyond what torch can count
            pass
    raise UserError(
        f"the config of {source.origin} describes a model of {settings.num_layers:,} layers, {settings.hidden_size:,} "
        "wide, which cannot be right"
    )


def parameter_shapes(settings: ModelSettings) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of our model, in its order."""
    with torch.device("meta"):
        return {name: tuple(parameter.shape) for name, parameter in Bert(settings).named_parameters()}


def is_padded(words: int, rows: int) -> bool:
    """Whether so many rows are those of so many words, filled up or not."""
    return rows in {-(-words // multiple) * multiple for multiple in PADDINGS}


def padded(tensor: Tensor, rows: int, value: float = 0.0) -> Tensor:
    """A tensor cut off, or filled up, at so many rows."""
    out = tensor.new_full((rows, *tensor.shape[1:]), value)
    out[: len(tensor)] = tensor[:rows]
    return out


def combined_digest(files: Sequence[Path]) -> str:
    """The SHA-256 of a file, or of the SHA-256s of several."""
    digests = [file_digest(path)[1] for path in files]
    return digests[0] if len(digests) == 1 else hashlib.sha256("\n".join(digests).encode()).hexdigest()


def in_a_sentence(parts: list[str]) -> str:
    """The first of some names, and how many more there are."""
    shown = ", ".join(parts[:NAMES_IN_A_SENTENCE])
    rest = len(parts) - NAMES_IN_A_SENTENCE
    return f"{shown} and {rest} more" if rest > 0 else shown
