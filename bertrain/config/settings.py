"""The settings of a run: the sections of `sections.py`, and what they must agree on among themselves.

`config.py` fills them in from recipes, files and the command line.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, get_type_hints

from bertrain.base.errors import UserError
from bertrain.base.units import parse_duration, parse_slice, parse_steps
from bertrain.config.sections import (
    BatchSettings,
    CheckpointSettings,
    DataSettings,
    EvaluateSettings,
    LogSettings,
    MlperfSettings,
    ModelSettings,
    OptimizerSettings,
    ScheduleSettings,
    TaskSettings,
    TrainSettings,
)

__all__ = [
    "BatchSettings",
    "CheckpointSettings",
    "DataSettings",
    "EvaluateSettings",
    "LogSettings",
    "MlperfSettings",
    "ModelSettings",
    "OptimizerSettings",
    "ScheduleSettings",
    "Settings",
    "TaskSettings",
    "TrainSettings",
]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A whole run; a recipe is one of these."""

    model: ModelSettings = field(default_factory=ModelSettings)
    data: DataSettings = field(default_factory=DataSettings)
    task: TaskSettings = field(default_factory=TaskSettings)
    batch: BatchSettings = field(default_factory=BatchSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    train: TrainSettings = field(default_factory=TrainSettings)
    evaluate: EvaluateSettings = field(default_factory=EvaluateSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    log: LogSettings = field(default_factory=LogSettings)
    mlperf: MlperfSettings = field(default_factory=MlperfSettings)

    @property
    def nominal_sequences(self) -> int:
        """Sequences in a step by name; 0 where it is measured in tokens and nothing was named."""
        return self.mlperf.global_batch_size or self.batch.sequences

    def check(self) -> Settings:
        """Refuse settings that contradict each other; returns itself."""
        model, data, batch = self.model.check(), self.data, self.batch
        if data.max_seq_length > model.max_positions:
            raise UserError(
                f"data.max_seq_length {data.max_seq_length} is more than model.max_positions {model.max_positions}"
            )
        is_task = bool(self.task.name)
        if not is_task:
            self._check_pretraining()
        if data.max_predictions >= data.max_seq_length and not is_task:
            raise UserError(
                f"data.max_predictions {data.max_predictions} leaves no context in "
                f"data.max_seq_length {data.max_seq_length}"
            )
        if bool(batch.sequences) == bool(batch.tokens):
            given = "both are" if batch.sequences else "neither is"
            raise UserError(f"a step is measured by batch.sequences or by batch.tokens, and {given} set; set one")
        if batch.token_budget < data.max_seq_length and (batch.token_budget or not is_task):
            raise UserError(
                f"batch.token_budget {batch.token_budget} cannot hold one example of "
                f"data.max_seq_length {data.max_seq_length}"
            )
        if self.task.name.startswith("squad/") and data.max_seq_length < self.task.max_query_length + 4:
            raise UserError(
                f"task.max_query_length {self.task.max_query_length} leaves no room for a text beside a question in "
                f"data.max_seq_length {data.max_seq_length}"
            )
        if batch.tokens and batch.tokens < data.max_seq_length:
            raise UserError(
                f"batch.tokens {batch.tokens} cannot hold one example of data.max_seq_length {data.max_seq_length}"
            )
        if batch.group_size and batch.policy != "exchange":
            raise UserError(
                f"batch.group_size {batch.group_size} is for batch.policy exchange, and the policy is {batch.policy}"
            )
        parse_slice(data.slice)
        parse_steps(self.train.skip_steps, "train.skip_steps")
        for name in ("max_time", "budget", "hang_timeout"):
            parse_duration(getattr(self.train, name), f"train.{name}")
        self.schedule.check()
        if self.train.budget and self.train.epochs:
            raise UserError(
                f"train.budget {self.train.budget} and train.epochs {self.train.epochs:g} each say how long it is; "
                "set --train.epochs 0 or leave the budget out"
            )
        if self.train.budget and self.schedule.warmup_share:
            raise UserError(
                f"train.budget {self.train.budget} finds the number of steps on the way; set schedule.warmup_steps "
                "instead of schedule.warmup_share"
            )
        if self.optimizer.name not in ("lamb", "adamw"):
            for name, default in (("layer_decay", 1.0), ("frozen_layers", 0)):
                if getattr(self.optimizer, name) != default:
                    raise UserError(
                        f"optimizer.{name} is for lamb and adamw, and optimizer.name is {self.optimizer.name}"
                    )
        if self.optimizer.frozen_layers > model.num_layers:
            raise UserError(
                f"optimizer.frozen_layers {self.optimizer.frozen_layers} is more than model.num_layers "
                f"{model.num_layers}"
            )
        if self.train.budget and self.schedule.decay_steps:
            raise UserError(
                f"train.budget {self.train.budget} sets where the decay ends; leave schedule.decay_steps "
                f"{self.schedule.decay_steps} out"
            )
        if 0 < self.log.straggler_factor <= 1:
            raise UserError(
                f"log.straggler_factor is {self.log.straggler_factor}; a slow rank takes more than 1 times the median, "
                "and 0 is never"
            )
        evaluate = self.evaluate
        if is_task and evaluate.data:
            raise UserError("evaluate.data is for pre-training; a task is evaluated on its held-out part, in --data")
        for name, asked in (
            ("every_samples", evaluate.every_samples > 0),
            ("target_accuracy", evaluate.target_accuracy > 0),
            ("rule", evaluate.rule == "mlperf"),
        ):
            if asked and not self.evaluates:
                raise UserError(f"evaluate.{name} is set, but evaluate.data names no folder to evaluate on")
        if evaluate.rule == "mlperf" and (evaluate.every_samples or not self.nominal_sequences):
            raise UserError(
                "evaluate.rule mlperf goes by batch.sequences, or by mlperf.global_batch_size where a step is measured "
                "in tokens; set that, and not evaluate.every_samples"
            )
        if batch.sequences and self.mlperf.global_batch_size not in (0, batch.sequences):
            raise UserError(
                f"a step has exactly batch.sequences {batch.sequences}, and mlperf.global_batch_size "
                f"{self.mlperf.global_batch_size} says otherwise; leave it out"
            )
        if self.checkpoint.keep_best and not self.checkpoint.enabled:
            raise UserError(
                "checkpoint.keep_best is set, but checkpoint.enabled is false, which keeps none; choose one"
            )
        if self.checkpoint.keep_best and not self.evaluates:
            raise UserError("checkpoint.keep_best is set, but evaluate.data names no folder to evaluate on")
        return self

    def _check_pretraining(self) -> None:
        """Refuse what is for fine-tuning alone."""
        if self.model.head != "pretrain":
            raise UserError(f"model.head {self.model.head} is for fine-tuning, and task.name names no task")
        for name, value in (
            ("train.epochs", self.train.epochs),
            ("evaluate.every_epochs", self.evaluate.every_epochs),
            ("evaluate.at_once", self.evaluate.at_once),
        ):
            if value:
                raise UserError(f"{name} is for fine-tuning; pre-training goes by steps and samples")

    def refuse_unsettled_task(self) -> None:
        """Refuse to train for a task as if it were pre-training: its model and its length are not settled yet."""
        if self.task.name and self.model.head == "pretrain":
            raise UserError(
                f"task.name is {self.task.name}, and pre-training has no task; fine-tune with `bertrain finetune "
                f"{self.task.name}`, or leave task.name out"
            )

    @property
    def evaluates(self) -> bool:
        """Whether there is something to evaluate on while it trains; a task brings it along."""
        return bool(self.evaluate.data or self.task.name)

    def to_dict(self) -> dict[str, dict[str, Any]]:
        return dataclasses.asdict(self)


SECTIONS: dict[str, type] = get_type_hints(Settings)
