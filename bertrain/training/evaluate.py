"""Held-out loss and accuracy, with masks that never change."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal, Protocol

import torch

from bertrain.base.console import warn
from bertrain.base.errors import UserError
from bertrain.config.settings import ModelSettings, Settings
from bertrain.data.feed.loader import Loader, check_data
from bertrain.data.formats.source import DataSource, open_data
from bertrain.model.batch import Batch
from bertrain.model.bert import Bert
from bertrain.model.heads import pretraining_sums
from bertrain.ranks import parallel
from bertrain.run import checkpoint
from bertrain.run.folder import Run, refuse_other_vocabulary
from bertrain.run.metrics import averages
from bertrain.training.compute import Predictor, predictor
from bertrain.training.open_data import open_task
from bertrain.training.precision import set_precision

KEPT_BYTES = 1 << 30  # of a rank's held-out batches, on its device; if they are more, they are made anew each time


def check_held_out(settings: Settings, shards: DataSource) -> None:
    """Refuse held-out data, if any is named, that does not fit the data to train on; a task's, if it is damaged."""
    if settings.task.name:
        open_task(shards.folder, settings, shards.vocabulary).held_out()
    if settings.evaluate.data:
        quiet = not parallel.is_first_process()
        held_out = open_data(settings.evaluate.data, vocab=settings.data.vocab, verify="size", quiet=quiet)
        check_data(held_out, settings)
        refuse_other_vocabulary(held_out, shards.vocabulary.hash)


def evaluate(
    run: str | Path,
    data: str | Path,
    *,
    which: str = "newest",
    max_examples: int = 0,
    device: Literal["auto", "cpu", "cuda"] = "auto",
) -> dict[str, float]:
    """Loss and accuracy of a run on a prepared folder, and the step it stands at.

    `which` is its `newest` whole checkpoint, its `best` one, or the number of a step.
    """
    opened = Run.open(run)
    if opened.settings.task.name:
        raise UserError(f"{run} was fine-tuned for {opened.settings.task.name}; its figures are `evaluate_task`'s")
    train = replace(opened.settings.train, device=device)
    quiet = not parallel.is_first_process()
    shards = open_data(data, vocab=opened.vocabulary(), verify=opened.settings.data.verify, quiet=quiet)
    refuse_other_vocabulary(shards, opened.vocabulary_hash)
    chosen, warnings = checkpoint.choose(opened.checkpoints, which)
    for warning in warnings:
        warn(warning)
    if chosen is None:
        raise UserError(f"the run {run} has no whole checkpoint to evaluate yet")
    set_precision(train)
    with parallel.join(train) as ranks:
        loader = Loader(shards, opened.settings, rank=ranks.rank, world=ranks.world)
        model = Bert(opened.settings.model).to(ranks.device)
        model.load_state_dict(checkpoint.read_weights(chosen))
        predict = predictor(model, replace(opened.settings, train=train), ranks.device)
        result = HeldOutEvaluator(loader, max_examples, opened.settings.model).evaluate(predict, ranks)
    return {"step": float(checkpoint.read_progress(chosen).step)} | result


class Evaluator(Protocol):
    """What a run is measured by while it trains."""

    @property
    def main_metric(self) -> str:
        """The figure by which one result is better than another."""

    def evaluate(self, predict: Predictor, ranks: parallel.Ranks) -> dict[str, float]:
        """Everything measured, each rank computing its share."""


class HeldOutEvaluator:
    """A rank's share of the held-out batches, kept on the device once they have been there."""

    main_metric = "mlm_accuracy"

    def __init__(self, loader: Loader, max_examples: int, model: ModelSettings) -> None:
        self._mask_id, self._model = loader.data.vocabulary.id_of("[MASK]"), model
        self._loader, self._max_examples = loader, max_examples
        self._kept: list[Batch] = []
        self._is_whole = False

    def batches(self, device: torch.device) -> Iterator[Batch]:
        """The batches, the same each time, on `device`."""
        if self._is_whole:
            yield from self._kept
            return
        kept, room = list[Batch](), KEPT_BYTES
        for batch in self._loader.evaluation(self._max_examples):
            moved = batch.to(device)
            room -= moved.num_bytes
            if room >= 0:
                kept.append(moved)
            yield moved
        if room >= 0:
            self._kept, self._is_whole = kept, True

    @torch.no_grad()
    def evaluate(self, predict: Predictor, ranks: parallel.Ranks) -> dict[str, float]:
        """Averages over the whole evaluation set, each rank computing its share."""
        sums = torch.zeros(4, dtype=torch.float64, device=ranks.device)
        counts = torch.zeros(2, dtype=torch.float64, device=ranks.device)
        words = torch.zeros(self._model.vocab_size, dtype=torch.float64, device=ranks.device)
        hidden = torch.zeros(2, dtype=torch.float64, device=ranks.device)  # right ones, and all
        ranks.heartbeat.enter("evaluation")
        for batch in self.batches(ranks.device):
            ranks.heartbeat.move()
            outputs = predict(batch)
            assert outputs.mlm_logits is not None
            sums += pretraining_sums(outputs.mlm_logits, outputs.nsp_logits, batch).stack()
            counts += torch.tensor([batch.num_predictions, batch.num_sequences], device=ranks.device)
            is_hidden = (batch.input_ids[batch.mlm_positions] == self._mask_id) & (batch.mlm_labels >= 0)
            is_right = outputs.mlm_logits.argmax(-1) == batch.mlm_labels
            hidden += torch.stack([(is_right & is_hidden).sum(), is_hidden.sum()])
            words += torch.bincount(batch.mlm_labels[batch.mlm_labels >= 0], minlength=len(words))
        ranks.sum(sums, counts, words, hidden)
        num_predictions, num_sequences = map(int, counts.tolist())
        result = averages(sums, num_predictions, num_sequences, self._model)
        # What a model that always says the same word would get, at best: the yardstick of having learnt anything. A
        # tenth of the words asked for stand there unmasked, and can be copied; those behind [MASK] are counted apart.
        return result | {
            "hidden_accuracy": float(hidden[0] / hidden[1].clamp(min=1)),
            "constant_accuracy": float(words.max()) / num_predictions,
            "examples": float(num_sequences),
        }
