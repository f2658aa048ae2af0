"""The engine of `model.rtd`: a smaller BERT replaces words, and the model says which (Clark et al., 2020, ELECTRA).

Of the words that a bin predicts, a share gets the guesses of the generator instead of [MASK]; the model predicts all of
them, as BERT does of its random words, and says for every token but [MASK] whether it was replaced. So each token
teaches, not only the masked ones. Unlike ELECTRA's, the generator is trained beforehand and stays as it is (the run
keeps a copy), and the model keeps its head of masked words.

The guesses are drawn from the bin's seed of dropout: training is the same on any number of ranks and after a resume.
The loop and the engines below only see other bins.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bertrain.base.errors import AgreedError, UserError
from bertrain.config.settings import ModelSettings, Settings
from bertrain.data.feed.loader import Step
from bertrain.data.formats.source import DataSource
from bertrain.model.batch import IGNORED, Batch
from bertrain.model.pooling import sequence_of_token
from bertrain.run.folder import Run
from bertrain.weights.huggingface import write_folder
from bertrain.weights.source import build_model, open_source, read_weights, refuse_incomplete, vocabulary_of
from bertrain.weights.tensors import Weights

if TYPE_CHECKING:
    from bertrain.training.engine import Engine, Predictor

ROWS_AT_ONCE = 1024  # of logits that are sampled together, to bound memory


def read_generator(settings: Settings, data: DataSource) -> Weights:
    """The weights of `data.generator`; refuses those that do not fit the run."""
    path = settings.data.generator
    weights = read_weights(path)
    found = weights.settings
    if found.head != "pretrain":
        raise UserError("no-pretraining-head", f"data.generator {path} is fine-tuned; name a pre-trained BERT")
    refuse_incomplete(weights_of_words(weights))
    if vocabulary_of(weights, path).hash != data.vocabulary.hash:
        differs = f"data.generator {path} has a different vocabulary from {data.folder}"
        raise AgreedError("other-vocabulary", f"{differs}; prepare the data with its vocab.txt, or take another one")
    if found.max_positions < settings.data.max_seq_length:
        reads = f"reads {found.max_positions} tokens, fewer than data.max_seq_length {settings.data.max_seq_length}"
        raise UserError("sequence-too-long", f"data.generator {path} {reads}; take another, or shorter examples")
    return weights


def weights_of_words(weights: Weights) -> Weights:
    """Weights without the heads that guess no words."""
    return replace(weights, settings=replace(weights.settings, nsp=False, rtd=0.0))


def settings_of_generator(settings: Settings, model: ModelSettings) -> Settings:
    """How a run computes a generator of this size: by any kernels, for it may have none where the run asks for them."""
    train = replace(settings.train, kernels="plain" if settings.train.kernels == "plain" else "auto")
    if train.precision == "fp8":  # which only trains
        train = replace(train, precision="bf16")
    return replace(settings, model=model, train=train)


def write_generator(weights: Weights, folder: Path) -> str:
    """Write the copy of a run, and return its SHA-256."""
    write_folder(folder, weights_of_words(weights))
    return open_source(folder).fingerprint()


def check_copy(run: Run) -> None:
    """Refuse a copy of the generator that has changed since the run started."""
    path = run.computed().data.generator
    if open_source(path).fingerprint() != run.generator_fingerprint:
        why = f"the weights in {path} have changed since the run started"
        raise UserError("changed-init", f"{why}; put back the weights of data.generator {run.settings.data.generator}")


def sample(logits: Tensor, generator: torch.Generator) -> Tensor:
    """A word for each row of logits [N, V], drawn from its softmax."""
    words = [
        # The largest of p / e over the words, with e from an exponential distribution, is a draw from p.
        (rows.float() - torch.empty_like(rows, dtype=torch.float32).exponential_(generator=generator).log_()).argmax(-1)
        for rows in logits.split(ROWS_AT_ONCE)
    ]
    return torch.cat(words)


def replace_words(batch: Batch, slots: Tensor, words: Tensor, mask_id: int) -> Batch:
    """The bin with `words` in place of the tokens that the prediction slots `slots` [N] point at."""
    is_real = batch.mlm_labels != IGNORED  # empty slots point at a row of another token, which must stay
    places, ids = batch.mlm_positions, batch.input_ids
    originals = ids.scatter(0, places, torch.where(is_real, batch.mlm_labels, ids[places]))
    places, is_real = places[slots], is_real[slots]
    changed = ids.scatter(0, places, torch.where(is_real, words, ids[places]))
    is_asked = batch.is_real[sequence_of_token(batch)] & (changed != mask_id)
    return replace(batch, input_ids=changed, replaced=torch.where(is_asked, (changed != originals).long(), IGNORED))


class WordReplacer:
    """Replaces words of bins by the guesses of `data.generator`, on a device."""

    def __init__(self, settings: Settings, device: torch.device, new_predictor: Callable[..., Predictor]) -> None:
        weights = weights_of_words(read_weights(settings.data.generator))
        vocabulary = vocabulary_of(weights, settings.data.generator)
        self._mask_id, self._num_words = vocabulary.id_of("[MASK]"), len(vocabulary.words)
        self._has_segments = not weights.settings.is_roberta
        self._share, self._device = settings.data.replaced_share, device
        of_generator = settings_of_generator(settings, weights.settings)
        self._predict = new_predictor(build_model(weights).to(device), of_generator, device)
        self._random = torch.Generator(device)

    @torch.no_grad()
    def __call__(self, batch: Batch) -> Batch:
        batch = batch.to(self._device)  # with its padding, so that all engines get the same words
        self._random.manual_seed(batch.dropout_seed)
        num_slots = len(batch.mlm_labels)
        order = torch.rand(num_slots, generator=self._random, device=self._device).argsort(stable=True)
        slots = order[: max(1, round(self._share * num_slots))]
        asked = replace(batch, mlm_positions=batch.mlm_positions[slots], mlm_labels=batch.mlm_labels[slots])
        if not self._has_segments:
            asked = replace(asked, segment_ids=torch.zeros_like(asked.segment_ids))
        logits = self._predict(asked).mlm_logits
        assert logits is not None
        words = sample(logits[:, : self._num_words], self._random)
        return replace_words(batch, slots, words, self._mask_id)


class ReplacingEngine:
    """Gives an engine bins with replaced words; see `engine.Engine` for the methods."""

    def __init__(self, engine: Engine, replacer: WordReplacer) -> None:
        self._engine, self._replacer = engine, replacer
        self._bins: list[Batch] = []  # that are still to be added

    @property
    def uses_graphs(self) -> bool:
        return self._engine.uses_graphs

    @uses_graphs.setter
    def uses_graphs(self, value: bool) -> None:
        self._engine.uses_graphs = value

    def begin(self, step: Step) -> None:
        self._bins = [self._replacer(batch) for batch in step.bins]
        self._engine.begin(replace(step, bins=self._bins.copy()))

    def add_bin(self, batch: Batch, step: Step, *, is_last: bool) -> None:
        self._engine.add_bin(self._bins.pop(0), step, is_last=is_last)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)
