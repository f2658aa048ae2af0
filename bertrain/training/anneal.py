"""`bertrain anneal`: the decay of a run's learning rate, from any of its checkpoints, in a new run.

The new run has the settings of the old one except its schedule and length. It begins with the old one's weights,
optimizer state, step and place in the data, so it is bitwise equal to a single run that decays from that step.
The old run stays unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from bertrain.base.errors import UserError
from bertrain.base.machine import is_first_rank
from bertrain.base.units import parse_fits
from bertrain.config.resolve import Overrides, override
from bertrain.config.settings import ScheduleSettings, Settings
from bertrain.optim.schedules import in_steps, learning_rate
from bertrain.planning.time_budget import UNKNOWN_STEPS, schedule_of
from bertrain.ranks import parallel
from bertrain.run import checkpoint
from bertrain.run.folder import Run
from bertrain.training.resolved_run import resolve_run
from bertrain.training.start import Trained, start
from bertrain.weights.source import NEWEST

OF_THE_DECAY = "schedule.decay", "schedule.power", "schedule.floor"


@dataclass(frozen=True)
class Annealing:
    """A run to begin or to continue: `pretrain` with these settings, data and initial weights."""

    settings: Settings
    data: Path
    init: str
    """The checkpoint that it begins with."""

    @property
    def step(self) -> int:
        return checkpoint.step_of(Path(self.init))


def anneal(
    source: str | Path,
    run: str | Path,
    steps: int,
    *,
    which: str = NEWEST,
    data: str | Path | None = None,
    overrides: Overrides | None = None,
) -> Trained:
    """Decay the learning rate of the run `source` over `steps` steps from a checkpoint, in the new run folder `run`.

    `which` is newest, best or the number of a step. `data` replaces the data of the run. `overrides` may change the
    shape of the decay (`schedule.decay`, `power`, `floor`) and settings that do not shape the training.
    """
    wanted = resolve_annealing(source, run, steps, which=which, data=data, overrides=overrides)
    with parallel.join(wanted.settings.train) as ranks:
        # The run may be training: every rank takes the checkpoint that the first one chose.
        step = ranks.broadcast_int(wanted.step)
        wanted = resolve_annealing(source, run, steps, which=str(step), data=data, overrides=overrides)
        return start(resolve_run(wanted.settings, wanted.data, run, init=wanted.init, ranks=ranks), ranks)


def resolve_annealing(
    source: str | Path,
    run: str | Path,
    steps: int,
    *,
    which: str = NEWEST,
    data: str | Path | None = None,
    overrides: Overrides | None = None,
) -> Annealing:
    """Settings, data and checkpoint of the new run. A run that has begun keeps its checkpoint."""
    opened = Run.open(source)
    if opened.settings.task.name:
        raise UserError(
            "pretraining-only", f"`anneal` continues pre-training, and {source} was fine-tuned; name a pre-trained run"
        )
    begun = Run.open(run) if Run.exists(run) else None
    path = Path(begun.init) if begun and begun.settings.train.init_progress == "keep" else None
    if path is None or which not in (NEWEST, str(checkpoint.step_of(path))):
        path, _ = checkpoint.choose(opened.checkpoints.resolve(), which, hashes=is_first_rank())
    step = checkpoint.step_of(path)
    train = replace(
        opened.settings.train, max_steps=step + steps, epochs=0.0, budget="", fits="", max_samples=0, max_time="",
        init_optimizer="keep", init_progress="keep", init_positions="same",
    )  # fmt: skip
    own = opened.computed()
    keeps_budget = replace(own.batch, auto=False)  # the token budget that the run has found; it shapes the dropout
    settings = replace(own, train=train, batch=keeps_budget, schedule=decay_from(step, opened))
    return Annealing(override(settings, overrides or (), also=OF_THE_DECAY), Path(data or opened.data), str(path))


def decay_from(step: int, run: Run) -> ScheduleSettings:
    """The schedule of a run with a decay from `step` to the end; refuses a step whose rate is not the base rate."""
    base, train = run.settings.optimizer.learning_rate, run.settings.train
    last = train.last_step() or UNKNOWN_STEPS
    schedule = schedule_of(step, run.settings, parse_fits(train.fits, "train.fits"))
    if (rate := learning_rate(step, base, schedule, last)) != base:
        cure = "choose a --checkpoint after the warm-up and before the decay, or train with --schedule.decay constant"
        found = f"at step {step} the learning rate of {run.folder} is {rate:.3g}, not its base rate {base:g}"
        raise UserError("not-at-base-rate", f"{found}; {cure}")
    schedule = in_steps(replace(schedule, start_warmup_step=0), last)  # the warm-up is over, wherever it began
    return replace(schedule, decay="1-sqrt", decay_start=step, decay_steps=0, power=1.0, floor=0.0)
