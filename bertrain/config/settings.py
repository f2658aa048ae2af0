"""The settings of a run: all sections together, and the checks between them.

`resolve.py` fills them in from recipes, files and the command line.
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
        """The nominal number of sequences in a step; 0 where a step is measured in tokens and none is set."""
        return self.mlperf.global_batch_size or self.batch.sequences

    @property
    def evaluates(self) -> bool:
        """Whether there is data to evaluate on during training; a task brings its own."""
        return bool(self.evaluate.data or self.task.name)

    def check(self) -> Settings:
        """Refuse settings that contradict each other; returns itself."""
        self.model.check()
        if not self.task.name:
            self._check_pretraining()
        self._check_lengths()
        self._check_batch()
        self._check_run_length()
        _check_schedule(self.schedule)
        self._check_optimizer()
        self._check_evaluation()
        if self.checkpoint.keep_best and not self.checkpoint.enabled:
            raise UserError(
                "conflicting-settings",
                "checkpoint.keep_best is set, but checkpoint.enabled is false, which keeps none; choose one",
            )
        if 0 < self.log.straggler_factor <= 1:
            raise UserError(
                "out-of-range",
                f"log.straggler_factor is {self.log.straggler_factor}; it must be more than 1, or 0 for no warning",
            )
        return self

    def refuse_unsettled_task(self) -> None:
        """Refuse to pre-train with a task: its model and its length are not resolved."""
        if self.task.name and self.model.head == "pretrain":
            raise UserError(
                "task-in-pretraining",
                f"task.name is {self.task.name}, and pre-training has no task; fine-tune with `bertrain finetune "
                f"{self.task.name}`, or leave task.name out",
            )

    def _check_pretraining(self) -> None:
        """Refuse settings of fine-tuning."""
        if self.model.head != "pretrain":
            raise UserError(
                "finetuning-only", f"model.head {self.model.head} is for fine-tuning, and task.name names no task"
            )
        for name, value in (
            ("train.epochs", self.train.epochs),
            ("evaluate.every_epochs", self.evaluate.every_epochs),
            ("evaluate.batch_size", self.evaluate.batch_size),
        ):
            if value:
                raise UserError(
                    "finetuning-only", f"{name} is for fine-tuning; pre-training is measured in steps and samples"
                )

    def _check_lengths(self) -> None:
        data, longest = self.data, self.data.max_seq_length
        parse_slice(data.slice)
        if longest > self.model.max_positions:
            raise UserError(
                "sequence-too-long",
                f"data.max_seq_length {longest} is more than model.max_positions {self.model.max_positions}",
            )
        if data.max_predictions >= longest and not self.task.name:
            raise UserError(
                "too-many-predictions",
                f"data.max_predictions {data.max_predictions} leaves no context in data.max_seq_length {longest}",
            )
        if self.task.name.startswith("squad/") and longest < self.task.max_query_length + 4:
            raise UserError(
                "query-too-long",
                f"task.max_query_length {self.task.max_query_length} leaves no room for a text beside a question in "
                f"data.max_seq_length {longest}",
            )

    def _check_batch(self) -> None:
        batch, longest = self.batch, self.data.max_seq_length
        if bool(batch.sequences) == bool(batch.tokens):
            given = "both are" if batch.sequences else "neither is"
            raise UserError(
                "step-size", f"a step is measured by batch.sequences or by batch.tokens, and {given} set; set one"
            )
        if batch.token_budget < longest and (batch.token_budget or not self.task.name):
            raise UserError(
                "bin-too-small",
                f"batch.token_budget {batch.token_budget} cannot hold one example of data.max_seq_length {longest}",
            )
        if 0 < batch.tokens < longest:
            raise UserError(
                "step-too-small",
                f"batch.tokens {batch.tokens} cannot hold one example of data.max_seq_length {longest}",
            )
        if batch.group_size and batch.policy != "exchange":
            raise UserError(
                "conflicting-settings",
                f"batch.group_size {batch.group_size} is for batch.policy exchange, and the policy is {batch.policy}",
            )
        if batch.sequences and self.mlperf.global_batch_size not in (0, batch.sequences):
            raise UserError(
                "conflicting-settings",
                f"a step has exactly batch.sequences {batch.sequences}, and mlperf.global_batch_size "
                f"{self.mlperf.global_batch_size} says otherwise; leave it out",
            )

    def _check_run_length(self) -> None:
        train, schedule = self.train, self.schedule
        parse_steps(train.skip_steps, "train.skip_steps")
        for name in ("max_time", "budget", "hang_timeout"):
            parse_duration(getattr(train, name), f"train.{name}")
        if not train.budget:
            return
        if train.epochs:
            raise UserError(
                "conflicting-settings",
                f"train.budget {train.budget} and train.epochs {train.epochs:g} both set the run's length; set "
                "--train.epochs 0 or leave the budget out",
            )
        if schedule.warmup_share:
            raise UserError(
                "conflicting-settings",
                f"train.budget {train.budget} sets the number of steps only during the run; set schedule.warmup_steps "
                "instead of schedule.warmup_share",
            )
        if schedule.decay_steps:
            raise UserError(
                "conflicting-settings",
                f"train.budget {train.budget} sets where the decay ends; leave schedule.decay_steps "
                f"{schedule.decay_steps} out",
            )

    def _check_optimizer(self) -> None:
        optimizer = self.optimizer
        for name, default in (("layer_decay", 1.0), ("frozen_layers", 0)):
            if optimizer.name not in ("lamb", "adamw") and getattr(optimizer, name) != default:
                raise UserError(
                    "conflicting-settings",
                    f"optimizer.{name} is for lamb and adamw, and optimizer.name is {optimizer.name}",
                )
        if optimizer.frozen_layers > self.model.num_layers:
            raise UserError(
                "out-of-range",
                f"optimizer.frozen_layers {optimizer.frozen_layers} is more than model.num_layers "
                f"{self.model.num_layers}",
            )

    def _check_evaluation(self) -> None:
        evaluate = self.evaluate
        if self.task.name and evaluate.data:
            raise UserError(
                "pretraining-only",
                "evaluate.data is for pre-training; a task is evaluated on its held-out part, in --data",
            )
        for name, is_set in (
            ("evaluate.every_samples", evaluate.every_samples > 0),
            ("evaluate.target_accuracy", evaluate.target_accuracy > 0),
            ("evaluate.rule", evaluate.rule == "mlperf"),
            ("checkpoint.keep_best", self.checkpoint.keep_best),
        ):
            if is_set and not self.evaluates:
                raise UserError(
                    "no-evaluation-data", f"{name} is set, but evaluate.data names no folder to evaluate on"
                )
        if evaluate.rule == "mlperf" and (evaluate.every_samples or not self.nominal_sequences):
            raise UserError(
                "conflicting-settings",
                "evaluate.rule mlperf goes by batch.sequences, or by mlperf.global_batch_size where a step is measured "
                "in tokens; set that, and not evaluate.every_samples",
            )

    def to_dict(self) -> dict[str, dict[str, Any]]:
        return dataclasses.asdict(self)


SECTIONS: dict[str, type] = get_type_hints(Settings)


def _check_schedule(schedule: ScheduleSettings) -> None:
    """Refuse a schedule that contradicts itself."""
    if schedule.warmup_share and (schedule.warmup_steps or schedule.start_warmup_step or schedule.decay_start):
        raise UserError(
            "conflicting-settings",
            "schedule.warmup_share says where the warm-up ends and the decay begins; leave warmup_steps, "
            "start_warmup_step and decay_start out",
        )
    warmup_end = schedule.warmup_steps + schedule.start_warmup_step
    if 0 < schedule.decay_steps < warmup_end:
        raise UserError(
            "conflicting-settings",
            f"the warm-up ends at step {warmup_end}, after schedule.decay_steps {schedule.decay_steps}, where the "
            "decay has ended",
        )
    if 0 < schedule.decay_steps <= schedule.decay_start:
        raise UserError(
            "conflicting-settings",
            f"schedule.decay_steps {schedule.decay_steps} is where the decay ends, and schedule.decay_start "
            f"{schedule.decay_start} where it begins; make the first the larger one",
        )
    for name in ("decay_start", "decay_steps", "floor"):
        if schedule.decay == "constant" and getattr(schedule, name):
            raise UserError(
                "conflicting-settings",
                f"schedule.{name} {getattr(schedule, name)} is for a rate that falls, and schedule.decay is constant; "
                f"set --schedule.{name} 0 or another decay",
            )
    exponent = {"polynomial": schedule.power, "square-root": 0.5}.get(schedule.decay, 1.0)
    if schedule.power not in (1.0, exponent):
        raise UserError(
            "conflicting-settings",
            f"schedule.power {schedule.power} is for schedule.decay polynomial, and the decay is {schedule.decay}; set "
            "--schedule.power 1 beside it",
        )
