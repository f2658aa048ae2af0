"""Evaluates a fine-tuned model: its outputs on whole splits of a task, their metrics, and latency."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import torch

from bertrain.base.console import warn
from bertrain.base.errors import AgreedError, UserError
from bertrain.base.formatting import BASELINE
from bertrain.config.settings import Settings
from bertrain.data.feed.loader import EVALUATION_STEP, Loader
from bertrain.data.formats.block import Block, flat_ranges
from bertrain.data.formats.masking import Ints
from bertrain.data.text.vocabulary import Vocabulary
from bertrain.model.batch import Batch
from bertrain.ranks import parallel
from bertrain.ranks.signals import NEVER, StopSignal
from bertrain.run.records import ClassScores
from bertrain.tasks.data import TaskData
from bertrain.tasks.metrics import predictions_of
from bertrain.tasks.table_task import TableSplit
from bertrain.tasks.tag.task import TagSplit
from bertrain.tasks.task import Split, Task, TaskOutputs
from bertrain.training.engine import Predictor
from bertrain.training.task_settings import usual_rate

TOKENS_AT_ONCE = {"cpu": 2048, "cuda": 16384}
"""Tokens of a bin, unless `evaluate.batch_size` sets an evaluation batch size: enough to keep a device busy."""
PERCENTILES = (50, 90, 95, 99, 100)


def task_data(split: Split, folder: str | Path, settings: Settings, vocabulary: Vocabulary) -> TaskData:
    if not len(split.block):
        raise UserError("no-examples", f"{folder} has no examples for the split {split.name} of {settings.task.name}")
    return TaskData(split.block, Path(folder), vocabulary, settings.data.max_seq_length)


class TaskEvaluator:
    """Evaluates a model on splits of a task, the main one first; always on all of their examples."""

    can_shrink = False

    def __init__(
        self, task: Task, splits: Mapping[str, Split], settings: Settings, folder: str | Path, words: Vocabulary
    ) -> None:
        self.main_metric, self._splits = task.main_metric, splits
        self._settings, self._folder, self._words = settings, folder, words
        self.num_examples = sum(len(split.block) for split in splits.values())
        self.report = ""  # on each class of the main split, at the last evaluation
        self.by_class: tuple[ClassScores, ...] = ()  # the same as numbers

    def shrink(self, num_examples: int) -> None:
        """Does nothing: a task is scored whole."""

    def evaluate(self, predict: Predictor, ranks: parallel.Ranks, stop: StopSignal = NEVER) -> dict[str, float]:
        """Metrics of the main split by name, the main metric first; of the others by split and name; and speed."""
        ranks.heartbeat.enter("evaluation")
        result: dict[str, float] = {}
        for name, split in self._splits.items():
            is_main = not result
            outputs, timing = self.outputs(split, predict, ranks, stop)
            if ranks.all_max(stop.request):
                return {}
            prefix = "" if is_main else f"{name}/"
            metrics = split.metrics(outputs).items()
            result |= {f"{prefix}{key}": value for key, value in metrics if is_main or not key.startswith(BASELINE)}
            if is_main:
                result |= timing
                self._check_classes(split, outputs, ranks)
        return {self.main_metric: result.pop(self.main_metric), **result}

    def _check_classes(self, split: Split, outputs: TaskOutputs, ranks: parallel.Ranks) -> None:
        """Report on each class, and warn of a model that predicts the same for every example, such as no label."""
        constant, unit = "", "example"
        if isinstance(split, TagSplit):
            self.report, self.by_class, unit = split.report(outputs), split.scores_by_class(outputs), "word"
            if np.ptp(outputs.argmax(axis=1)) == 0 < len({*chain.from_iterable(split.true_tags)}) - 1:
                constant = repr(split.labels[int(outputs[0].argmax())])
        elif isinstance(split, TableSplit):
            self.report, self.by_class = split.report_by_class(outputs), split.scores_by_class(outputs)
            if not split.describe_constant(split.targets):
                constant = split.describe_constant(predictions_of(outputs, split.task.head))
        if constant and ranks.is_first:
            rate, usual = self._settings.optimizer.learning_rate, usual_rate(self._settings.model)
            other = "" if rate == usual else f" ({usual:g} is usual for AdamW and this width)"
            advice = f"train longer, or with another optimizer.learning_rate than {rate:g}{other}"
            warn(f"the model predicts {constant} for every {unit} of {split.name}: {advice}")

    @torch.no_grad()
    def outputs(
        self, split: Split, predict: Predictor, ranks: parallel.Ranks, stop: StopSignal = NEVER
    ) -> tuple[TaskOutputs, dict[str, float]]:
        """The model's outputs for a whole split in its order, on every rank; and how fast they were computed."""
        model, batch_size = self._settings.model, self._settings.evaluate.batch_size
        num_columns = {"span": 2, "regress": 1, "embed": model.hidden_size}.get(model.head, model.num_labels)
        found = torch.zeros(_num_outputs(split.block, model.head), num_columns)
        seconds: list[float] = []
        began = time.perf_counter()
        for rows, batch in self._loader(split, ranks).evaluation_bins(0, batch_size or EVALUATION_STEP):
            if stop.received:
                break
            ranks.heartbeat.move()
            in_bin, in_block = _output_places(split.block, rows, batch, model.head)
            started = time.perf_counter()
            batch = batch.without_padding() if ranks.device.type == "cpu" else batch.to(ranks.device)
            answers = predict(batch).answers
            assert answers is not None
            on_host = answers.float().cpu()  # waits for the device
            seconds.append(time.perf_counter() - started)
            found[torch.from_numpy(in_block)] = on_host[torch.from_numpy(in_bin)]
        if ranks.is_connected:  # rows of other ranks are zero
            whole = found.to(ranks.device)
            ranks.all_reduce_sum(whole)
            found = whole.cpu()
        if not found.isfinite().all():
            wrong = f"the model has diverged: its outputs for {split.name} are not all finite"
            raise AgreedError("diverged", f"{wrong}; lower optimizer.learning_rate")
        return found.numpy(), _timing(split.num_examples, time.perf_counter() - began, seconds)

    def _loader(self, split: Split, ranks: parallel.Ranks) -> Loader:
        settings, longest = self._settings, self._settings.data.max_seq_length
        batch_size = settings.evaluate.batch_size
        budget = batch_size * longest or max(TOKENS_AT_ONCE[ranks.device.type], longest)
        batch = replace(settings.batch, policy="budget", group_size=0, token_budget=budget, bin_sequences=batch_size)
        data = task_data(split, self._folder, settings, self._words)
        return Loader(data, replace(settings, batch=batch), rank=ranks.rank, world=ranks.world)


def _slots(batch: Batch) -> Ints:
    """The indices of the sequences of a bin that are examples, not padding."""
    return np.flatnonzero(batch.is_real.numpy())


def _num_outputs(block: Block, head: str) -> int:
    """The number of rows that a head computes for a whole block: of examples, of tokens or of labeled words."""
    if head == "tag":
        assert block.masks is not None
        return int(block.masks.offsets[-1])
    return int(block.offsets[-1]) if head == "span" else len(block)


def _output_places(block: Block, rows: Ints, batch: Batch, head: str) -> tuple[Ints, Ints]:
    """The positions of the outputs for `rows` among those of their bin, and among those of the whole block."""
    if head == "tag":
        assert block.masks is not None
        in_block = flat_ranges(block.masks.offsets[rows], block.masks.counts[rows])
        return np.arange(len(in_block)), in_block
    if head == "span":
        starts, lengths = batch.cu_seqlens.numpy()[_slots(batch)].astype(np.int64), block.lengths[rows]
        return flat_ranges(starts, lengths), flat_ranges(block.offsets[rows], lengths)
    return _slots(batch), rows


def _timing(num_examples: int, elapsed: float, seconds: list[float]) -> dict[str, float]:
    """Examples per second overall, and percentiles of the time of each bin."""
    latencies = 1e3 * np.percentile(seconds or [0.0], PERCENTILES)
    return {
        "examples": float(num_examples),
        "examples_per_s": num_examples / elapsed,
        **{f"latency_ms_p{share}": float(value) for share, value in zip(PERCENTILES, latencies, strict=True)},
    }
