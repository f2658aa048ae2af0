"""The settings of a run: all sections together, and the checks between them.

`resolve.py` fills them in from recipes, files and the command line.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, get_type_hints

from bertrain.base.errors import UserError
from bertrain.base.files import HUB_PREFIX
from bertrain.base.units import parse_duration, parse_fits, parse_shares, parse_slice, parse_steps
from bertrain.config.model import ModelSettings as ModelSettings
from bertrain.config.sections import BatchSettings as BatchSettings
from bertrain.config.sections import CheckpointSettings as CheckpointSettings
from bertrain.config.sections import DataSettings as DataSettings
from bertrain.config.sections import EvaluateSettings as EvaluateSettings
from bertrain.config.sections import LogSettings as LogSettings
from bertrain.config.sections import MlperfSettings as MlperfSettings
from bertrain.config.sections import OptimizerSettings as OptimizerSettings
from bertrain.config.sections import ScheduleSettings as ScheduleSettings
from bertrain.config.sections import TrainSettings as TrainSettings
from bertrain.config.task import TaskSettings as TaskSettings


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
        self._check_replaced()
        self._check_batch()
        parse_steps(self.train.skip_steps, "train.skip_steps")
        parse_fits(self.train.fits, "train.fits")
        for name in ("max_time", "budget", "hang_timeout"):
            parse_duration(getattr(self.train, name), f"train.{name}")
        if self.train.init_progress == "keep" != self.train.init_optimizer:
            raise UserError(
                "conflicting-settings", "train.init_progress keep needs train.init_optimizer keep; set both"
            )
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
            raise UserError("out-of-range", f"log.straggler_factor is {factor}; set more than 1, or 0 for no warning")
        return self

    def refuse_unsettled_task(self) -> None:
        """Refuse to pre-train with a task: its model and its length are not resolved."""
        task = self.task.name
        if task and self.model.head == "pretrain":
            raise UserError(
                "task-in-pretraining",
                f"task.name {task} is for fine-tuning; use `bertrain finetune {task}`, or leave it out",
            )

    def _check_pretraining(self) -> None:
        head = self.model.head
        if head != "pretrain":
            raise UserError(
                "finetuning-only", f"model.head {head} is for fine-tuning; leave it out, or use `bertrain finetune`"
            )
        for name in ("every_epochs", "batch_size"):
            if getattr(self.evaluate, name):
                raise UserError("finetuning-only", f"evaluate.{name} is for fine-tuning; use evaluate.every_samples")

    def other_folders(self) -> list[str]:
        """What a new run reads besides its data and initial weights, without what the hub has."""
        return [path for path in (self.evaluate.data, self.data.generator) if path and not path.startswith(HUB_PREFIX)]

    def _check_replaced(self) -> None:
        if self.task.name and (self.model.rtd or self.data.generator):
            given = "model.rtd" if self.model.rtd else "data.generator"
            raise UserError("pretraining-only", f"{given} is for pre-training; leave it out")
        if bool(self.model.rtd) != bool(self.data.generator):
            given, lacking = ("data.generator", "model.rtd") if self.data.generator else ("model.rtd", "data.generator")
            why = f"{given} is set without {lacking}"
            raise UserError(
                "conflicting-settings",
                f"{why}; replaced-token detection needs both, such as --model.rtd 50 --data.generator WEIGHTS",
            )

    def _check_lengths(self) -> None:
        parse_slice(self.data.slice)
        longest, positions = self.data.max_seq_length, self.model.max_positions
        if longest > positions:
            advice = "lower the first, or raise the second (with --init: --train.init_positions extend)"
            raise UserError(
                "sequence-too-long", f"data.max_seq_length {longest} exceeds model.max_positions {positions}; {advice}"
            )
        if self.task.name and not longest:
            raise UserError(
                "out-of-range", f"data.max_seq_length is 0, but task.name {self.task.name} needs a length; set it"
            )
        most = self.data.max_predictions
        if 0 < longest <= most and not self.task.name:
            wrong = f"data.max_predictions {most} is not below data.max_seq_length {longest}"
            raise UserError("too-many-predictions", f"{wrong}; lower it")
        question = self.task.max_query_length
        if self.task.name.startswith("squad/") and longest < question + 4:
            wrong = f"task.max_query_length {question} leaves no tokens for text in data.max_seq_length {longest}"
            raise UserError("query-too-long", f"{wrong}; lower the first or raise the second")

    def _check_batch(self) -> None:
        batch, budget, longest = self.batch, self.batch.token_budget, self.data.max_seq_length
        if bool(batch.sequences) == bool(batch.tokens):
            given = "both are set; set one of them to 0" if batch.sequences else "neither is set; set one"
            raise UserError("step-size", f"batch.sequences or batch.tokens sets the size of a step; {given}")
        if budget < longest and (budget or not self.task.name):
            wrong = f"batch.token_budget {budget} is below data.max_seq_length {longest}"
            raise UserError("bin-too-small", f"{wrong}; raise the first or lower the second")
        if 0 < batch.tokens < longest:
            wrong = f"batch.tokens {batch.tokens} is below data.max_seq_length {longest}"
            raise UserError("step-too-small", f"{wrong}; raise the first or lower the second")
        if bool(batch.ramp_tokens) != bool(batch.ramp_from):
            raise UserError(
                "conflicting-settings", "batch.ramp_tokens and batch.ramp_from work only together; set both"
            )
        if (full := batch.sequences or batch.tokens) < batch.ramp_from:
            wrong = f"batch.ramp_from {batch.ramp_from} is above the full size of a step, {full}"
            raise UserError("conflicting-settings", f"{wrong}; lower it")
        if batch.tokens and 0 < batch.ramp_from < longest:
            first = f"batch.ramp_from {batch.ramp_from}"
            raise UserError("step-too-small", f"{first} is below data.max_seq_length {longest}; raise it")
        if batch.shares and batch.ramp_tokens:
            raise UserError(
                "conflicting-settings", "batch.shares needs steps of equal size; leave batch.ramp_tokens out"
            )
        if (shares := parse_shares(batch.shares)) and (not batch.sequences or batch.sequences % sum(shares)):
            parts = f"batch.shares {batch.shares} add up to {sum(shares)}"
            raise UserError("conflicting-settings", f"{parts}; make batch.sequences a multiple of that")
        group, policy = batch.group_size, batch.policy
        if group and policy != "exchange":
            wrong = f"batch.group_size {group} is for batch.policy exchange, not {policy}"
            raise UserError("conflicting-settings", f"{wrong}; leave it out")
        nominal, sequences = self.mlperf.global_batch_size, batch.sequences
        if sequences and nominal not in (0, sequences):
            raise UserError(
                "conflicting-settings",
                f"mlperf.global_batch_size {nominal} differs from batch.sequences {sequences}; leave it out",
            )

    def _check_optimizer(self) -> None:
        optimizer, layers = self.optimizer, self.model.num_layers
        if (rate := optimizer.learning_rate) < 0 and (rate != -1 or not self.task.name or optimizer.name != "adamw"):
            advice = "set 0 or more; only fine-tuning with adamw takes -1 (chosen by the width of the weights)"
            raise UserError("out-of-range", f"optimizer.learning_rate is {rate:g}; {advice}")
        for name, default in (("layer_decay", 1.0), ("frozen_layers", 0)):
            if optimizer.name in ("madgrad", "acclip") and getattr(optimizer, name) != default:
                why = f"optimizer.{name} does not work with {optimizer.name}; use lamb, adamw, stableadamw or muon"
                raise UserError("conflicting-settings", why)
        frozen = optimizer.frozen_layers
        if frozen > layers:
            wrong = f"optimizer.frozen_layers {frozen} is more than model.num_layers {layers}"
            raise UserError("out-of-range", f"{wrong}; lower it")

    def _check_evaluation(self) -> None:
        evaluate = self.evaluate
        if not self.task.name and evaluate.target_accuracy > 1:
            why = f"evaluate.target_accuracy is {evaluate.target_accuracy:g}, but accuracy is at most 1"
            raise UserError("bad-target", why)
        if self.task.name and evaluate.data:
            raise UserError(
                "pretraining-only", "evaluate.data is for pre-training; leave it out: a task is evaluated on its --data"
            )
        for name, is_set in (
            ("evaluate.every_samples", evaluate.every_samples > 0),
            ("evaluate.target_accuracy", evaluate.target_accuracy > 0),
            ("evaluate.rule", evaluate.rule == "mlperf"),
            ("checkpoint.keep_best", self.checkpoint.keep_best),
        ):
            if is_set and not self.evaluates:
                raise UserError("no-evaluation-data", f"{name} needs data to evaluate on; give --evaluate.data DIR")
        if evaluate.rule == "mlperf" and (evaluate.every_samples or not self.nominal_sequences):
            raise UserError(
                "conflicting-settings",
                "evaluate.rule mlperf needs batch.sequences, or mlperf.global_batch_size if batch.tokens sets the size "
                "of a step; set it, and leave evaluate.every_samples out",
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
            "schedule.warmup_share sets the warm-up; leave warmup_steps, start_warmup_step and decay_start out",
        )
    if schedule.decay_share and (schedule.decay_start or schedule.decay_steps):
        raise UserError(
            "conflicting-settings",
            "schedule.decay_share sets the decay; leave decay_start and decay_steps out",
        )
    if (both := schedule.warmup_share + schedule.decay_share) > 1:
        raise UserError(
            "conflicting-settings",
            f"schedule.warmup_share and schedule.decay_share add up to {both:g}; together they must be at most 1",
        )
    warmup_end, decay_end = schedule.warmup_steps + schedule.start_warmup_step, schedule.decay_steps
    if 0 < decay_end < warmup_end:
        raise UserError(
            "conflicting-settings",
            f"the warm-up ends at step {warmup_end}, after schedule.decay_steps {decay_end}; make it shorter",
        )
    if 0 < decay_end <= schedule.decay_start:
        raise UserError("conflicting-settings", f"schedule.decay_start must be below schedule.decay_steps {decay_end}")
    for name in ("decay_start", "decay_share", "decay_steps", "floor"):
        if schedule.decay == "constant" and getattr(schedule, name):
            raise UserError(
                "conflicting-settings", f"schedule.{name} has no use in a constant schedule; set --schedule.{name} 0"
            )
    exponent = {"polynomial": schedule.power, "square-root": 0.5}.get(schedule.decay, 1.0)
    if schedule.power not in (1.0, exponent):
        wrong = f"schedule.power is for polynomial decay, not for {schedule.decay}"
        raise UserError("conflicting-settings", f"{wrong}; set --schedule.power 1")
