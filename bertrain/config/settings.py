"""The settings of a run: all sections together, and the checks between them.

`resolve.py` fills them in from recipes, files and the command line.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, get_type_hints

from bertrain.base.errors import UserError
from bertrain.base.units import parse_duration, parse_fits, parse_shares, parse_slice, parse_steps
from bertrain.config.sections import BatchSettings as BatchSettings
from bertrain.config.sections import CheckpointSettings as CheckpointSettings
from bertrain.config.sections import DataSettings as DataSettings
from bertrain.config.sections import EvaluateSettings as EvaluateSettings
from bertrain.config.sections import LogSettings as LogSettings
from bertrain.config.sections import MlperfSettings as MlperfSettings
from bertrain.config.sections import ModelSettings as ModelSettings
from bertrain.config.sections import OptimizerSettings as OptimizerSettings
from bertrain.config.sections import ScheduleSettings as ScheduleSettings
from bertrain.config.sections import TaskSettings as TaskSettings
from bertrain.config.sections import TrainSettings as TrainSettings


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
    given: frozenset[str] | None = field(default=None, compare=False, repr=False)
    """The settings that the user named over the recipe, which weights must not replace; None: all of them."""

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
        parse_steps(self.train.skip_steps, "train.skip_steps")
        parse_fits(self.train.fits, "train.fits")
        for name in ("max_time", "budget", "hang_timeout"):
            parse_duration(getattr(self.train, name), f"train.{name}")
        if self.train.init_progress == "keep" != self.train.init_optimizer:
            raise UserError("conflicting-settings", "train.init_progress keep needs train.init_optimizer keep")
        if self.train.exchange_precision == "fp16" != self.train.precision:
            what = "train.exchange_precision fp16 needs the loss scale of train.precision fp16"
            raise UserError("conflicting-settings", f"{what}; use --train.exchange_precision bf16")
        self.log.tracker_names()
        _check_schedule(self.schedule)
        self._check_optimizer()
        self._check_evaluation()
        if self.checkpoint.keep_best and not self.checkpoint.enabled:
            raise UserError("conflicting-settings", "checkpoint.keep_best needs checkpoint.enabled; set that to true")
        factor = self.log.straggler_factor
        if 0 < factor <= 1:
            raise UserError("out-of-range", f"log.straggler_factor is {factor}; make it more than 1, or 0: no warning")
        return self

    def refuse_unsettled_task(self) -> None:
        """Refuse to pre-train with a task: its model and its length are not resolved."""
        task = self.task.name
        if task and self.model.head == "pretrain":
            raise UserError(
                "task-in-pretraining", f"pre-training has no task.name {task}; `bertrain finetune {task}`, or omit it"
            )

    def _check_pretraining(self) -> None:
        head = self.model.head
        if head != "pretrain":
            raise UserError("finetuning-only", f"model.head {head} is for fine-tuning, and task.name names no task")
        for name in ("every_epochs", "batch_size"):
            if getattr(self.evaluate, name):
                raise UserError("finetuning-only", f"evaluate.{name} is for fine-tuning; use evaluate.every_samples")

    def _check_lengths(self) -> None:
        parse_slice(self.data.slice)
        longest, positions = self.data.max_seq_length, self.model.max_positions
        if longest > positions:
            advice = "raise that, or with --init use --train.init_positions extend"
            raise UserError(
                "sequence-too-long", f"data.max_seq_length {longest} exceeds model.max_positions {positions}; {advice}"
            )
        if self.task.name and not longest:
            raise UserError(
                "out-of-range", f"data.max_seq_length 0 is for prepared data; task.name {self.task.name} needs one"
            )
        most = self.data.max_predictions
        if 0 < longest <= most and not self.task.name:
            raise UserError("too-many-predictions", f"data.max_predictions {most} fills data.max_seq_length {longest}")
        question = self.task.max_query_length
        if self.task.name.startswith("squad/") and longest < question + 4:
            raise UserError("query-too-long", f"task.max_query_length {question} fills data.max_seq_length {longest}")

    def _check_batch(self) -> None:
        batch, budget, longest = self.batch, self.batch.token_budget, self.data.max_seq_length
        if bool(batch.sequences) == bool(batch.tokens):
            given = "both are" if batch.sequences else "neither is"
            raise UserError("step-size", f"batch.sequences or batch.tokens measures a step; {given} set; set one")
        if budget < longest and (budget or not self.task.name):
            raise UserError("bin-too-small", f"batch.token_budget {budget} is below data.max_seq_length {longest}")
        if 0 < batch.tokens < longest:
            raise UserError("step-too-small", f"batch.tokens {batch.tokens} is below data.max_seq_length {longest}")
        if bool(batch.ramp_tokens) != bool(batch.ramp_from):
            raise UserError("conflicting-settings", "batch.ramp_tokens and batch.ramp_from make a ramp; set both")
        if (full := batch.sequences or batch.tokens) < batch.ramp_from:
            raise UserError("conflicting-settings", f"batch.ramp_from {batch.ramp_from} is above the full size {full}")
        if batch.tokens and 0 < batch.ramp_from < longest:
            first = f"batch.ramp_from {batch.ramp_from}"
            raise UserError("step-too-small", f"{first} is below data.max_seq_length {longest}")
        if batch.shares and batch.ramp_tokens:
            raise UserError("conflicting-settings", "batch.shares needs steps of one size; leave batch.ramp_tokens out")
        if (shares := parse_shares(batch.shares)) and (not batch.sequences or batch.sequences % sum(shares)):
            parts = f"batch.shares {batch.shares} makes parts of {sum(shares)} examples"
            raise UserError("conflicting-settings", f"{parts}; make batch.sequences a multiple of that")
        group, policy = batch.group_size, batch.policy
        if group and policy != "exchange":
            raise UserError("conflicting-settings", f"batch.group_size {group} is for policy exchange, not {policy}")
        nominal, sequences = self.mlperf.global_batch_size, batch.sequences
        if sequences and nominal not in (0, sequences):
            raise UserError(
                "conflicting-settings",
                f"mlperf.global_batch_size {nominal} is not batch.sequences {sequences}; omit it",
            )

    def _check_optimizer(self) -> None:
        optimizer, layers = self.optimizer, self.model.num_layers
        if (rate := optimizer.learning_rate) < 0 and (rate != -1 or not self.task.name or optimizer.name != "adamw"):
            advice = "set at least 0; -1, by the width of the weights, is for fine-tuning with adamw"
            raise UserError("out-of-range", f"optimizer.learning_rate is {rate:g}; {advice}")
        for name, default in (("layer_decay", 1.0), ("frozen_layers", 0)):
            if optimizer.name in ("madgrad", "acclip") and getattr(optimizer, name) != default:
                why = f"optimizer.{name} is for lamb, adamw, stableadamw and muon, not {optimizer.name}"
                raise UserError("conflicting-settings", why)
        frozen = optimizer.frozen_layers
        if frozen > layers:
            raise UserError("out-of-range", f"optimizer.frozen_layers {frozen} is more than model.num_layers {layers}")

    def _check_evaluation(self) -> None:
        evaluate = self.evaluate
        if self.task.name and evaluate.data:
            raise UserError("pretraining-only", "evaluate.data is for pre-training; a task is evaluated on its --data")
        for name, is_set in (
            ("evaluate.every_samples", evaluate.every_samples > 0),
            ("evaluate.target_accuracy", evaluate.target_accuracy > 0),
            ("evaluate.rule", evaluate.rule == "mlperf"),
            ("checkpoint.keep_best", self.checkpoint.keep_best),
        ):
            if is_set and not self.evaluates:
                raise UserError("no-evaluation-data", f"{name} is set, but evaluate.data names no folder")
        if evaluate.rule == "mlperf" and (evaluate.every_samples or not self.nominal_sequences):
            raise UserError(
                "conflicting-settings",
                "evaluate.rule mlperf goes by batch.sequences, or by mlperf.global_batch_size where a step is measured "
                "in tokens; set that, and not evaluate.every_samples",
            )

    def to_dict(self) -> dict[str, dict[str, Any]]:
        return {section: dataclasses.asdict(getattr(self, section)) for section in SECTIONS}

    def dotted(self) -> dict[str, str]:
        """Every setting as text, by its name such as train.max_steps."""
        sections = self.to_dict().items()
        return {f"{section}.{name}": str(value) for section, part in sections for name, value in part.items()}


SECTIONS: dict[str, type] = {name: kind for name, kind in get_type_hints(Settings).items() if name != "given"}


def _check_schedule(schedule: ScheduleSettings) -> None:
    if schedule.warmup_share and (schedule.warmup_steps or schedule.start_warmup_step or schedule.decay_start):
        raise UserError(
            "conflicting-settings",
            "schedule.warmup_share ends the warm-up; leave warmup_steps, start_warmup_step and decay_start out",
        )
    if schedule.decay_share and (schedule.decay_start or schedule.decay_steps):
        raise UserError(
            "conflicting-settings",
            "schedule.decay_share begins and ends the decay; leave decay_start and decay_steps out",
        )
    if (both := schedule.warmup_share + schedule.decay_share) > 1:
        raise UserError(
            "conflicting-settings", f"schedule.warmup_share and schedule.decay_share add up to {both:g}, more than 1"
        )
    warmup_end, decay_end = schedule.warmup_steps + schedule.start_warmup_step, schedule.decay_steps
    if 0 < decay_end < warmup_end:
        raise UserError(
            "conflicting-settings", f"the warm-up ends at step {warmup_end}, after schedule.decay_steps {decay_end}"
        )
    if 0 < decay_end <= schedule.decay_start:
        raise UserError("conflicting-settings", f"schedule.decay_start must be below schedule.decay_steps {decay_end}")
    for name in ("decay_start", "decay_share", "decay_steps", "floor"):
        if schedule.decay == "constant" and getattr(schedule, name):
            raise UserError("conflicting-settings", f"schedule.decay constant has no {name}; set --schedule.{name} 0")
    exponent = {"polynomial": schedule.power, "square-root": 0.5}.get(schedule.decay, 1.0)
    if schedule.power not in (1.0, exponent):
        raise UserError("conflicting-settings", f"schedule.decay {schedule.decay} has no power; set --schedule.power 1")
