"""Models to serve, each by what its head can do. Answers come from the functions behind predict, fill-mask and embed.

head                                 operation      as in
pretrain                             fill-mask      bertrain fill-mask
classify, multilabel, regress, tag   predict        bertrain predict
span                                 answer         bertrain predict, for SQuAD
embed, or no head at all             embed, nearest bertrain embed
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bertrain.base.errors import UserError
from bertrain.config.choices import Device
from bertrain.config.settings import TrainSettings
from bertrain.data.text.tokenizer import AnyTokenizer, tokenizer_of
from bertrain.ranks.parallel import Ranks
from bertrain.serving import operations
from bertrain.serving.operations import Operation
from bertrain.serving.requests import Ask
from bertrain.tasks.squad.task import SquadTask
from bertrain.tasks.table_task import TableTask
from bertrain.training.embed import Encoder
from bertrain.training.engine import Predictor
from bertrain.training.fill_mask import MaskFiller, open_filler
from bertrain.training.precision import set_precision
from bertrain.training.predict import TaskModel, open_model
from bertrain.weights.hub import locate
from bertrain.weights.sentence_transformers import find_pipeline
from bertrain.weights.source import open_source

MAX_GUESSES = 50_000  # for the masks of one request
FOREVER = ""  # for train.hang_timeout: a server may wait for requests


@dataclass(frozen=True)
class FillMask:
    """A model with an MLM head. As the others below, it answers several requests together.

    `answer` raises UserError if the model cannot read one of them.
    """

    filler: MaskFiller
    form = "fill-mask"
    operations = (operations.FILL_MASK,)

    @property
    def train(self) -> TrainSettings:
        return self.filler.settings.train

    def about(self) -> dict[str, Any]:
        return {"reads": f"at most {self.filler.settings.data.max_seq_length} tokens"}

    def answer(self, asks: Sequence[Ask]) -> list[list[Any]]:
        answers: dict[int, list[Any]] = {}
        for top in {ask.options["top"] for ask in asks}:  # else one request could make all ask for as many words
            numbers = [number for number, ask in enumerate(asks) if ask.options["top"] == top]
            together = [asks[number] for number in numbers]
            block = self.filler.encode(_texts_of(together))
            assert block.masks is not None
            if any(top * sum(counts) > MAX_GUESSES for counts in _split(block.masks.counts.tolist(), together)):
                raise UserError("too-many-masks", f"ask for at most {MAX_GUESSES:,} words for all masks together")
            filled = [[[asdict(guess) for guess in guesses] for guesses in row] for row in self.filler.fill(block, top)]
            answers |= dict(zip(numbers, _split(filled, together), strict=True))
        return [answers[number] for number in range(len(asks))]


@dataclass(frozen=True)
class Task:
    """A fine-tuned run, or exported weights."""

    model: TaskModel
    tokenizer: AnyTokenizer

    @property
    def train(self) -> TrainSettings:
        return self.model.settings.train

    @property
    def form(self) -> str:
        return self.model.task.head

    @property
    def operations(self) -> tuple[Operation, ...]:
        known = {"span": operations.ANSWER, "tag": operations.TAG}
        labels, is_pair = self.model.task.labels, self.model.reads_pairs
        return (known.get(self.form) or operations.predict_operation(self.form, labels, is_pair=is_pair),)

    def about(self) -> dict[str, Any]:
        task, found = self.model.task, dict[str, Any](pairs=self.model.reads_pairs)
        if self.form == "multilabel" and isinstance(task, TableTask):
            values = np.full(len(task.labels), 0.5) if task.thresholds is None else task.thresholds
            found["thresholds"] = dict(zip(task.labels, values.tolist(), strict=True))
        most = self.model.settings.data.max_seq_length
        return found | {"reads": f"{'at most' if isinstance(task, TableTask) else 'windows of'} {most} tokens"}

    def answer(self, asks: Sequence[Ask]) -> list[list[Any]]:
        settings, is_table = self.model.settings, isinstance(self.model.task, TableTask)
        for ask in asks:
            if is_table and not ask.options["truncate"]:
                _refuse_long(self.tokenizer, ask, settings.data.max_seq_length)
            if isinstance(self.model.task, SquadTask):
                questions = replace(ask, texts=[question for question, _ in ask.texts])
                _refuse_long(self.tokenizer, questions, settings.task.max_query_length + 2, "question")
        texts = _texts_of(asks)
        given = self.model.encode([one for pair in texts for one in pair] if self.model.reads_pairs else texts)
        self.model.task.notes.clear()  # they are about files
        return _split(self.model.answers(given), asks)


@dataclass(frozen=True)
class Embed:
    encoder: Encoder
    predict: Predictor
    ranks: Ranks
    tokenizer: AnyTokenizer
    form = "embed"
    operations = (operations.EMBED, operations.NEAREST)

    @property
    def train(self) -> TrainSettings:
        return self.encoder.settings.train

    def about(self) -> dict[str, Any]:
        return {"reads": f"at most {self.encoder.pipeline.max_seq_length} tokens"}

    def answer(self, asks: Sequence[Ask]) -> list[list[Any]]:
        for ask in asks:
            if not ask.options["truncate"]:
                _refuse_long(self.tokenizer, ask, self.encoder.pipeline.max_seq_length)
        vectors, _ = self.encoder.embed(_texts_of(asks), self.predict, self.ranks)
        found = _split(vectors, asks)
        return [
            rank_by_cosine(ask, own) if ask.operation == "nearest" else own.tolist()
            for ask, own in zip(asks, found, strict=True)
        ]


Served = FillMask | Task | Embed


def rank_by_cosine(ask: Ask, vectors: np.ndarray) -> list[dict[str, Any]]:
    """The texts after the first by their cosine similarity with it, the nearest first."""
    normalized = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    similarity = normalized[1:] @ normalized[0]
    order = np.argsort(-similarity, kind="stable")[: ask.options["top"]].tolist()
    return [{"index": one, "text": ask.texts[one + 1], "similarity": float(similarity[one])} for one in order]


def _texts_of(asks: Sequence[Ask]) -> list[Any]:
    return [text for ask in asks for text in ask.texts]


def _split(answers: Any, asks: Sequence[Ask]) -> list[Any]:
    """The answers to all texts, cut into those of each request."""
    stops = np.cumsum([len(ask.texts) for ask in asks]).tolist()
    return [answers[stop - len(ask.texts) : stop] for ask, stop in zip(asks, stops, strict=True)]


def _refuse_long(tokenizer: AnyTokenizer, ask: Ask, limit: int, what: str = "text") -> None:
    """Refuse texts, or pairs of texts, of more tokens than the model reads."""
    for index, text in enumerate(ask.texts):
        parts = [text] if isinstance(text, str) else text
        count = 1 + sum(1 + len(tokenizer.encode_raw(part)) // tokenizer.dtype.itemsize for part in parts)
        if count > limit:
            cure = '; shorten it, or have it cut ("truncate": true)' if what == "text" else "; shorten it"
            name = ask.name_of(index, what)
            raise UserError("text-too-long", f"{name} has {count} tokens; the model reads {limit}{cure}")


# --- opening -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NamedModel:
    """A model at the path of its name."""

    name: str
    source: str
    model: Served
    about: dict[str, Any]  # for its page
    num_threads: int  # with which it computes on a CPU

    def operation(self, name: str) -> Operation | None:
        return next((one for one in self.model.operations if one.name == name), None)


@contextmanager
def open_models(
    sources: Sequence[str | Path], *, which: str = "newest", device: Device = "auto",
    overrides: Sequence[tuple[str, str]] = (), reserved: Sequence[str] = (),
) -> Iterator[list[NamedModel]]:  # fmt: skip
    """The models, each named after its folder; a name that is taken or `reserved` gets a number."""
    with ExitStack() as stack:
        models = list[NamedModel]()
        for source in sources:
            stem = re.sub(r"[^\w.-]+", "-", Path(source).resolve().name.rpartition(":")[2], flags=re.ASCII).strip("-.")
            taken, number, name = {*reserved, *(one.name for one in models)}, 1, stem or "model"
            while name in taken:
                number += 1
                name = f"{stem or 'model'}-{number}"
            model = _open(source, which, device, overrides, stack)
            about = {"form": model.form} | model.about()
            # It has joined its ranks, which sets train.threads.
            models.append(NamedModel(name, str(source), model, about, torch.get_num_threads()))
        yield models


def _open(
    source: str | Path, which: str, device: Device, overrides: Sequence[tuple[str, str]], stack: ExitStack
) -> Served:
    opened = open_source(source, which=which, hashes=False)
    head = opened.settings.head if opened.settings is not None else "pretrain"
    if head not in ("pretrain", "embed"):
        own = [("train.hang_timeout", FOREVER), ("task.on_error", "stop")]  # to skip a text would shift answers
        model = stack.enter_context(open_model(source, None, which, device, 0, [*overrides, *own], has_files=False))
        return Task(model, tokenizer_of(model.finetuned.vocabulary))
    if overrides:
        why = f"settings such as --{overrides[0][0]} are for fine-tuned models, which {source} is not"
        raise UserError("option-without-effect", f"{why}; serve it without them")
    is_sentence_encoder = opened.kind != "run" and find_pipeline(locate(source)) is not None
    if head == "pretrain" and not is_sentence_encoder:
        try:
            opening = open_filler(source, which, device=device, hang_timeout=FOREVER)
            return FillMask(stack.enter_context(opening))
        except UserError as error:
            if error.code != "missing-tensors":  # an encoder without an MLM head still embeds
                raise
    encoder = Encoder.open(source, which=which, device=device)
    train = replace(encoder.settings.train, hang_timeout=FOREVER)
    encoder = replace(encoder, settings=replace(encoder.settings, train=train))
    return Embed(encoder, *stack.enter_context(encoder.ready()), tokenizer_of(encoder.vocabulary))


def answer_together(named: NamedModel, asks: Sequence[Ask]) -> list[list[Any] | Exception]:
    """The answers to each request, or its error; one that fails is set apart from the others by halves."""
    set_precision(named.model.train)  # both are of the whole process, which may serve several models
    torch.set_num_threads(named.num_threads)
    try:
        return [*named.model.answer(asks)]
    except Exception as error:
        if len(asks) == 1:
            return [error]
    half = len(asks) // 2
    return [*answer_together(named, asks[:half]), *answer_together(named, asks[half:])]
