"""OpenedWeights, which every reader of a weight format returns, and Weights, into which its tensors are loaded."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from bertrain.base.errors import UserError
from bertrain.base.files import file_digest
from bertrain.config.settings import ModelSettings
from bertrain.data.text.vocabulary import Vocabulary
from bertrain.model.initialization import uninitialized
from bertrain.weights.names import TRANSFORMERS, ParameterSlice, adapt_to_head

Kind = Literal["run", "huggingface", "nvidia", "tf1"]
PADDED_BY_VOCABULARY = ("embeddings.words.weight", "masked_words.bias")
"""Tensors with a row per word, which may be followed by rows of padding."""
WRITTEN_PADDINGS = (1, 8, 64)
"""Exported vocabularies are padded to a multiple of one of these, as by `model.pad_vocab_to`."""
READ_PADDINGS = (1, 8, 16, 32, 64)
"""Extra rows of others' weights are padding if they fill up to a multiple of one of these."""
PADDING_LIMIT = READ_PADDINGS[-1]
POSITIONS = "embeddings.positions.weight"  # the tensor with a row per position of a sequence
NAMES_LISTED = 8


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, not read yet."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    read: Callable[[], Tensor]
    place: ParameterSlice | None = None  # the parameter of our model that it holds; None if there is no such parameter
    is_transposed: bool = False
    is_skipped: bool = False  # known not to be a weight: optimizer state, a counter, a constant


def store_in_memory(name: str, value: object, place: ParameterSlice | None = None) -> StoredTensor:
    """A value of a state_dict; skipped unless it is a tensor."""
    if not isinstance(value, Tensor):
        return StoredTensor(name, (), type(value).__name__, 0, read=Tensor, is_skipped=True)
    dtype = str(value.dtype).removeprefix("torch.")
    return StoredTensor(name, tuple(value.shape), dtype, value.nbytes, read=value.detach, place=place)


@dataclass(frozen=True)
class OpenedWeights:
    """A file or folder of weights, opened: its tensors under their own names, its config and vocabulary."""

    kind: Kind
    origin: str
    fingerprint: Callable[[], str]
    tensors: tuple[StoredTensor, ...]
    settings: ModelSettings | None = None  # None without a config file
    vocabulary: Vocabulary | None = None
    global_step: int | None = None  # training steps, if it says so
    labels: tuple[str, ...] = ()  # class names of its head, if it says so
    thresholds: dict[str, float] = field(default_factory=dict)  # by label, for several labels a text, if it says so
    max_seq_length: int = 0  # of the texts that a run was trained on; 0: not known
    finetuned_as: dict[str, str] = field(default_factory=dict)  # settings of FINETUNED_AS, if it says so


@dataclass(frozen=True)
class Weights:
    """Tensors under our names, with the model and vocabulary they belong to."""

    origin: str
    fingerprint: str  # SHA-256 of the file
    tensors: dict[str, Tensor]
    settings: ModelSettings
    vocabulary: Vocabulary | None
    left_over: tuple[str, ...] = ()  # tensors of the file that our model does not have
    skipped: tuple[str, ...] = ()  # tensors of the file that are not weights: optimizer state, counters, constants
    kind: Kind = "run"
    global_step: int | None = None
    labels: tuple[str, ...] = ()  # class names of the head, if they are known
    thresholds: dict[str, float] = field(default_factory=dict)  # by label, for several labels a text, if they are known
    max_seq_length: int = 0  # of the texts that a run was trained on; 0: not known
    finetuned_as: dict[str, str] = field(default_factory=dict)  # settings of FINETUNED_AS, if they are known
    normalizes: bool = True  # an embedding model: whether its vectors have length 1
    padding: int = 0  # rows of vocabulary padding that were dropped
    thirds: tuple[str, ...] = ()  # queries, keys or values without the other two; they are left over
    rounded: tuple[str, ...] = ()  # tensors rounded from float64 to float32

    @property
    def missing(self) -> list[str]:
        """Tensors of a model with its head, or with both pre-training heads, that the source lacks."""
        whole = replace(self.settings, nsp=not self.settings.is_roberta)
        return [name for name in parameter_shapes(whole) if name not in self.tensors]


NamedTensors = dict[ParameterSlice, tuple[str, Tensor]]  # tensors and their names in the file, by parameter


def load_tensors(source: OpenedWeights) -> Weights:
    """Load tensors under our names in fp32; refuses tensors of a wrong shape, naming all of them."""
    if source.settings is None:
        cure = "put it there, or use `bertrain weights import --config FILE`"
        raise UserError("missing-config", f"{source.origin} has no bert_config.json or config.json beside it; {cure}")
    shapes = expected_shapes(source, replace(source.settings, nsp=True))
    placed: NamedTensors = {}
    left_over: list[str] = []
    skipped: list[str] = []
    rounded: list[str] = []
    wrong: list[str] = []
    padding = 0
    for stored in source.tensors:
        place = stored.place and adapt_to_head(stored.place, source.settings.head, source.settings.family)
        if place is None or place.parameter not in shapes:
            (skipped if stored.is_skipped else left_over).append(stored.name)
            continue
        if problem := _find_mismatch(stored, place, shapes[place.parameter], source.settings):
            wrong.append(problem)
        elif not wrong:
            tensor = stored.read().float()
            # Without rows of padding; a second copy must be equal to the first.
            tensor = (tensor.t() if stored.is_transposed else tensor[: shapes[place.parameter][0]]).contiguous()
            if place in placed:
                _refuse_difference(placed[place], (stored.name, tensor), source.origin)
            placed[place] = (stored.name, tensor)
            if stored.dtype == "float64":
                rounded.append(stored.name)
            if place.parameter == PADDED_BY_VOCABULARY[0]:
                padding = stored.shape[0] - source.settings.vocab_size
    if wrong:
        raise UserError("shape-mismatch", f"the weights of {source.origin} do not fit its config: {', '.join(wrong)}")
    if source.vocabulary is not None:
        words, rows = len(source.vocabulary.words), source.settings.vocab_size
        if not 0 <= rows - words < PADDING_LIMIT:  # more words than rows, or fewer than padding explains
            sizes = f"{words:,} words in its vocabulary, but {rows:,} in its config"
            raise UserError("vocabulary-mismatch", f"{source.origin} has {sizes}; one file belongs to other weights")
    tensors, strays = _join_thirds(placed, source.origin)
    is_bert = source.settings.family == "bert"
    has_next_sentence = is_bert and all(name in tensors for name in shapes if name.startswith("next_sentence."))
    return Weights(
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
        thresholds=source.thresholds,
        max_seq_length=source.max_seq_length,
        finetuned_as=source.finetuned_as,
        padding=padding,
        thirds=tuple(strays),
        rounded=tuple(rounded),
    )


def _find_mismatch(stored: StoredTensor, place: ParameterSlice, expected: tuple[int, ...], model: ModelSettings) -> str:
    """A sentence on a wrong type or shape, or nothing."""
    shape = stored.shape[::-1] if stored.is_transposed else stored.shape
    if place.third >= 0:
        expected = (expected[0] // 3, *expected[1:])
    if not stored.dtype.startswith(("float", "bfloat")):
        return f"{stored.name} is of type {stored.dtype}"
    if place.parameter in PADDED_BY_VOCABULARY and len(shape) == len(expected):
        expected = (model.vocab_size, *expected[1:])
        fits = is_padded(model.vocab_size, shape[0]) and shape[1:] == expected[1:]
    else:
        fits = shape == expected
    wanted = expected[::-1] if stored.is_transposed else expected
    return "" if fits else f"{stored.name} is {stored.shape}, not {wanted}"


def _join_thirds(placed: NamedTensors, origin: str) -> tuple[dict[str, Tensor], list[str]]:
    """Whole tensors by our name, and the names of thirds without the others."""
    tensors = {place.parameter: tensor for place, (_, tensor) in placed.items() if place.third < 0}
    strays = []
    for ours in dict.fromkeys(place.parameter for place in placed if place.third >= 0):
        slices = [place for third in range(3) if (place := ParameterSlice(ours, third)) in placed]
        if ours in tensors:
            for place in slices:
                name, whole = placed[ParameterSlice(ours)]
                _refuse_difference((name, place.select(whole)), placed[place], origin)
        elif len(slices) == 3:
            tensors[ours] = torch.cat([placed[place][1] for place in slices])
        else:
            strays += [placed[place][0] for place in slices]
    return tensors, strays


def _refuse_difference(one: tuple[str, Tensor], other: tuple[str, Tensor], origin: str) -> None:
    if torch.equal(one[1], other[1]):
        return
    if one[0] == other[0]:
        raise UserError("untied-weights", f"{origin} has two different tensors {one[0]}; download the model again")
    raise UserError("untied-weights", f"{one[0]} and {other[0]} of {origin} differ, but are one tensor of the model")


def expected_shapes(source: OpenedWeights, settings: ModelSettings) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the model in the config; refuses a config with impossible sizes."""
    if settings.num_layers <= 1000:  # more would take long to build
        try:
            return parameter_shapes(settings)
        except (RuntimeError, TypeError):  # sizes beyond what torch can count
            pass
    sizes = f"{settings.num_layers:,} layers, hidden size {settings.hidden_size:,}"
    raise UserError("bad-config", f"the config of {source.origin} has impossible sizes: {sizes}")


def parameter_shapes(settings: ModelSettings) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in uninitialized(settings).named_parameters()}


def huggingface_names(settings: ModelSettings) -> dict[str, ParameterSlice]:
    """The parameter of each tensor of Hugging Face's class for a family and head; of BERT, BertForPreTraining."""
    family, table = settings.family, TRANSFORMERS[settings.family]
    table = {theirs: adapt_to_head(place, settings.head, family) for theirs, place in table.items()}
    return name_parameters(table, replace(settings, nsp=True))


def name_parameters(table: Mapping[str, ParameterSlice], settings: ModelSettings) -> dict[str, ParameterSlice]:
    """The names in a table of the parameters that a model has, of each layer."""
    names, parameters = {}, parameter_shapes(settings)
    for theirs, place in table.items():
        for layer in range(settings.num_layers) if "{}" in theirs else (0,):
            ours = place.parameter.format(layer)
            if ours in parameters:
                names[theirs.format(layer)] = place._replace(parameter=ours)
    return names


def is_padded(words: int, rows: int) -> bool:
    """Whether a table of `rows` rows can be that of `words` words, padded or not."""
    return rows in {-(-words // multiple) * multiple for multiple in READ_PADDINGS}


def pad_rows(tensor: Tensor, rows: int, value: float = 0.0) -> Tensor:
    """A tensor truncated to `rows` rows, or padded to them with `value`."""
    out = tensor.new_full((rows, *tensor.shape[1:]), value)
    out[: len(tensor)] = tensor[:rows]
    return out


def combined_digest(files: Sequence[Path]) -> str:
    """The SHA-256 of a file, or of the SHA-256s of several."""
    digests = [file_digest(path)[1] for path in files]
    return digests[0] if len(digests) == 1 else hashlib.sha256("\n".join(digests).encode()).hexdigest()


def list_names(parts: list[str]) -> str:
    """The first names, and the number of the others."""
    shown = ", ".join(parts[:NAMES_LISTED])
    rest = len(parts) - NAMES_LISTED
    return f"{shown} and {rest} more" if rest > 0 else shown
