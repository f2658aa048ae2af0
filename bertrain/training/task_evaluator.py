"""What a fine-tuned model is worth: its outputs on whole splits of a task, their figures, and how long they took."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from bertrain.base.errors import AgreedError
from bertrain.config.settings import Settings
from bertrain.data.feed.loader import EVALUATION_STEP, Loader
from bertrain.data.formats.block import Block, flat_ranges
from bertrain.data.formats.masking import Ints
from bertrain.data.text.tokenizer import Vocabulary
from bertrain.model.batch import IGNORED, Batch
from bertrain.ranks import parallel
from bertrain.tasks.task import Outputs, Split, Task
from bertrain.training.compute import Predictor
from bertrain.training.open_data import task_data

TOKENS_AT_ONCE = {"cpu": 2048, "cuda": 16384}
"""Bins in which a device is fast, where nobody asks for a number of examples."""
PERCENTILES = (50, 90, 95, 99, 100)


class TaskEvaluator:
    """The splits of a task by which a run is measured, the main one first."""

    def __init__(
        self,
        task: Task,
        splits: Mapping[str, Split],
        settings: Settings,
        folder: str | Path,
        words: Vocabulary,
    ) -> None:
        self.main_metric, self._splits = task.main_metric, splits
        self._settings, self._folder, self._words = settings, folder, words

    def evaluate(self, predict: Predictor, ranks: parallel.Ranks) -> dict[str, float]:
        """Figures of the main split by name, the main one first; those of the others by split and name; speed."""
        ranks.heartbeat.enter("evaluation")
        result: dict[str, float] = {}
        for name, split in self._splits.items():
            is_main = not result
            outputs, timing = self.outputs(split, predict, ranks)
            prefix = "" if is_main else f"{name}/"
            result |= {f"{prefix}{figure}": value for figure, value in split.metrics(outputs).items()}
            if is_main:
                result |= timing
        return {self.main_metric: result.pop(self.main_metric), **result}

    @torch.no_grad()
    def outputs(self, split: Split, predict: Predictor, ranks: parallel.Ranks) -> tuple[Outputs, dict[str, float]]:
        """What the model says of a whole split, on every rank, in its order; and how fast it says it."""
        model, at_once = self._settings.model, self._settings.evaluate.batch_size
        is_span = model.head == "span"
        num_columns = {"span": 2, "regress": 1}.get(model.head, model.num_labels)
        found = torch.zeros(int(split.block.offsets[-1]) if is_span else len(split.block), num_columns)
        seconds: list[float] = []
        began = time.perf_counter()
        for rows, batch in self._loader(split, ranks).evaluation_bins(0, at_once or EVALUATION_STEP):
            ranks.heartbeat.move()
            started = time.perf_counter()
            answers = predict(batch.to(ranks.device)).answers
            assert answers is not None
            said = answers.float().cpu()  # which waits for the device
            seconds.append(time.perf_counter() - started)
            here, there = _token_places(split.block, rows, batch) if is_span else (_slots(batch), rows)
            found[torch.from_numpy(there)] = said[torch.from_numpy(here)]
        if ranks.is_connected:  # what another rank computed is zero here
            whole = found.to(ranks.device)
            ranks.sum(whole)
            found = whole.cpu()
        if not found.isfinite().all():
            raise AgreedError(f"the model gives no finite numbers for some of {split.name}; it has diverged")
        return found.numpy(), _timing(split.num_examples, time.perf_counter() - began, seconds)

    def _loader(self, split: Split, ranks: parallel.Ranks) -> Loader:
        settings, longest = self._settings, self._settings.data.max_seq_length
        at_once = settings.evaluate.batch_size
        budget = at_once * longest or max(TOKENS_AT_ONCE[ranks.device.type], longest)
        batch = replace(settings.batch, policy="budget", group_size=0, token_budget=budget, bin_sequences=at_once)
        data = task_data(split, self._folder, settings, self._words)
        return Loader(data, replace(settings, batch=batch), rank=ranks.rank, world=ranks.world)


def _slots(batch: Batch) -> Ints:
    """The sequences of a bin that are examples, in their order."""
    return np.flatnonzero(batch.nsp_labels.numpy() != IGNORED)


def _token_places(block: Block, rows: Ints, batch: Batch) -> tuple[Ints, Ints]:
    """Where the tokens of these rows lie in their bin, and where in the whole block."""
    starts, lengths = batch.cu_seqlens.numpy()[_slots(batch)].astype(np.int64), block.lengths[rows]
    return flat_ranges(starts, lengths), flat_ranges(block.offsets[rows], lengths)


def _timing(num_examples: int, elapsed: float, seconds: list[float]) -> dict[str, float]:
    """Examples each second over the whole, and percentiles of the time that each bin took."""
    latencies = 1e3 * np.percentile(seconds or [0.0], PERCENTILES)
    return {
        "examples": float(num_examples),
        "examples_per_s": num_examples / elapsed,
        **{f"latency_ms_p{share}": float(value) for share, value in zip(PERCENTILES, latencies, strict=True)},
    }
