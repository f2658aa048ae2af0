"""Fine-tuning: a task's settings are settled from its data and the weights to begin with; the rest is `pretrain`'s.

finetune        one run
finetune_many   several seeds or tasks, one after another, and a table of what they came to
predict         a run's answers to what has none yet, in the task's official form
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from bertrain.data.tokenizer import Vocabulary
from bertrain.errors import UserError
from bertrain.files import write_atomically
from bertrain.model.bert import Bert
from bertrain.observe.console import warn
from bertrain.settings import ModelSettings, Settings
from bertrain.tasks.task import Split, Task
from bertrain.train import checkpoint, parallel
from bertrain.train.checkpoint import Progress
from bertrain.train.compute import predictor
from bertrain.train.examples import open_task, words_for
from bertrain.train.precision import set_precision
from bertrain.train.pretrain import pretrain
from bertrain.train.room import BUDGET_STEP
from bertrain.train.runs import Run
from bertrain.train.scores import TaskJudge
from bertrain.weights.source import open_source

ARCHITECTURE = (
    "vocab_size",
    "hidden_size",
    "num_layers",
    "num_heads",
    "intermediate_size",
    "max_positions",
    "num_segments",
    "layer_norm_eps",
)
"""What of a model is as its weights were made, whatever a recipe says; dropout is the recipe's."""
DEVIATIONS = 4  # above the mean that a step's tokens may lie and still be one bin
MOST_AT_ONCE = 16384  # tokens of a bin, unless one example or the user asks for more


def finetune(settings: Settings, data: str | Path, run: str | Path, *, init: str) -> Progress:
    """Fine-tune the weights `init` for the task that `settings` name, whose files lie in `data`, into the folder `run`.

    If `run` holds this very run already, it is continued.
    """
    return pretrain(settle_task(settings, data, run, init=init), data, run, init=init)


def settle_task(settings: Settings, data: str | Path, run: str | Path, *, init: str, world: int = 0) -> Settings:
    """The settings of a run whose model, length and bins follow from its task, its data and its weights."""
    words = words_for(settings, run, init)
    assert words is not None
    task = open_task(data, settings, words)
    begun = Run.open(run).settings if (Path(run) / "config.json").is_file() else None
    block = task.training().block
    settings = replace(settings, model=_model_for(task, settings.model, begun, init))
    settings = _in_steps(settings, len(block), float(block.lengths.mean()))
    if settings.batch.token_budget == 0:
        budget = begun.batch.token_budget if begun else usual_budget(settings, block.lengths, world)
        settings = replace(settings, batch=replace(settings.batch, token_budget=budget))
    return settings.check()


def _model_for(task: Task, asked: ModelSettings, begun: Settings | None, init: str) -> ModelSettings:
    there = begun.model if begun else open_source(init).settings
    if there is None:
        raise UserError(f"no bert_config.json (or config.json) lies beside {init}; put it there")
    model = replace(asked, **{name: getattr(there, name) for name in ARCHITECTURE})
    return replace(model, head=task.head, num_labels=max(2, len(task.labels)))


def _in_steps(settings: Settings, num_rows: int, mean_length: float) -> Settings:
    """What was said in passes over the data, in steps and examples."""
    train, evaluate, batch = settings.train, settings.evaluate, settings.batch
    if train.epochs:
        steps = train.epochs * num_rows / (batch.sequences or batch.tokens / mean_length)
        train = replace(train, max_steps=max(1, math.ceil(steps - 1e-9)))
    if evaluate.every_epochs:
        evaluate = replace(evaluate, every_samples=max(1, round(evaluate.every_epochs * num_rows)))
    return replace(settings, train=train, evaluate=evaluate)


def usual_budget(settings: Settings, lengths: Any, world: int) -> int:
    """Tokens of a bin that holds a rank's share of nearly every step, so that little of it is junk."""
    longest = min(settings.data.max_seq_length, int(lengths.max()))
    ranks = world or parallel.count_ranks()
    if settings.batch.tokens:
        needed = settings.batch.tokens / ranks + longest
    else:
        count = math.ceil(settings.batch.sequences / ranks)
        needed = count * float(lengths.mean()) + DEVIATIONS * math.sqrt(count) * float(lengths.std())
    budget = max(min(int(needed), MOST_AT_ONCE), settings.data.max_seq_length)
    return -(-budget // BUDGET_STEP) * BUDGET_STEP
