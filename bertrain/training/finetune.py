"""Fine-tuning: a task's settings are settled from its data and the weights to begin with; the rest is `pretrain`'s.

finetune        one run
finetune_many   several seeds or tasks, one after another, and a table of what they came to
evaluate_task       a run's figures, again or on other data
predict         a run's answers to what has none yet, in the task's official form
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from bertrain.base.console import remark, warn
from bertrain.base.errors import UserError, nearest
from bertrain.base.files import write_atomically
from bertrain.config.resolve import named_in, override, resolve
from bertrain.config.settings import ModelSettings, Settings
from bertrain.data.text.tokenizer import Vocabulary
from bertrain.model.bert import Bert
from bertrain.planning.memory_fit import BUDGET_STEP
from bertrain.ranks import parallel
from bertrain.run import checkpoint
from bertrain.run.checkpoint import Progress
from bertrain.run.folder import Run
from bertrain.run.records import EndRecord, EvaluationRecord, Record, StepRecord, read_records
from bertrain.tasks import glue, registry
from bertrain.tasks.tables import HUB
from bertrain.tasks.task import Outputs, Split, Task
from bertrain.training.compute import Predictor, predictor
from bertrain.training.open_data import forget_task, open_task, words_for
from bertrain.training.precision import set_precision
from bertrain.training.pretrain import in_examples, preflight, pretrain
from bertrain.training.task_evaluator import TaskEvaluator
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
"""What of a model is as its weights were made; dropout is the recipe's."""
DEVIATIONS = 4  # above the mean that a step's tokens may lie and still be one bin
DEVIATIONS_AMONG_RANKS = 2.5  # of the whole step, above which it makes a bin too many; as far below, one too few
# What may differ from one file to another, and so from those that a run was trained on.
HOW_FILES_ARE_READ = ("task.on_error", "task.text", "task.text_pair", "task.label")
BUDGETED_WARM_UP = 50
RESULTS = "results.json"
SPEED, SPEED_OVERALL = "train_examples_per_s", "train_examples_per_s_overall"
ABOUT_SPEED = ("examples", "latency", "train_examples")  # how names of figures begin that are no score
MOST_AT_ONCE = 16384  # tokens of a bin, unless one example or the user asks for more


def finetune(settings: Settings, data: str | Path, run: str | Path, *, init: str) -> Progress:
    """Fine-tune the weights `init` for the task that `settings` name, whose files lie in `data`, into the folder `run`.

    If `run` holds this very run already, it is continued.
    """
    forget_task()
    return _finetune(settings, data, run, init)


def _finetune(settings: Settings, data: str | Path, run: str | Path, init: str) -> Progress:
    return pretrain(settle_task(settings, data, run, init=init), data, run, init=init)


def resolve_task(
    name: str,
    overrides: Sequence[tuple[str, str]] = (),
    *,
    recipe: str = "",
    settings_file: str | Path | None = None,
) -> Settings:
    """The settings of a task by its recipe (or `recipe`), a settings file over it, and overrides over both.

    Of train.epochs, max_steps and budget, the overrides may name one, and so may the file; it takes the place of the
    recipe's. So it is with evaluate.every_epochs and every_samples. A run whose length is a time has no share of its
    steps to warm up over: it warms up over 50.
    """
    if name not in registry.task_names():
        raise UserError(f"there is no task {name!r}{nearest(name, registry.task_names())}")
    chosen = recipe or ("finetune-squad" if name.startswith("squad/") else "finetune-glue")
    given, in_file = dict(overrides), named_in(settings_file)
    changes = [*overrides, ("task.name", name)]
    for rivals, what in RIVALS:
        changes += _displaced(rivals, what, given) or _displaced(rivals, what, in_file)
    budget = dict(changes).get("train.budget", in_file.get("train.budget"))
    by_share = resolve(chosen).schedule.warmup_share > 0
    if budget and by_share and "schedule.warmup_share" not in in_file | given:
        changes.append(("schedule.warmup_share", "0"))
        if "schedule.warmup_steps" not in in_file | given:
            changes.append(("schedule.warmup_steps", str(BUDGETED_WARM_UP)))
    return resolve(chosen, changes, settings_file)


RIVALS: tuple[tuple[dict[str, str], str], ...] = (
    ({"train.epochs": "0", "train.budget": "", "train.max_steps": ""}, "how long the run is"),
    ({"evaluate.every_epochs": "0", "evaluate.every_samples": "0"}, "when to evaluate"),
)
"""Settings that say the same in different measures, with what each is where it says nothing."""


def _displaced(rivals: Mapping[str, str], what: str, given: Mapping[str, str]) -> list[tuple[str, str]]:
    """The settings that the one given puts out of force; nothing where none is given."""
    named = [key for key in rivals if given.get(key, "0") not in ("", "0", "0.0")]
    if len(named) > 1:
        raise UserError(f"{' and '.join(named)} each say {what}; give one of them")
    return [(key, none) for key, none in rivals.items() if named and key not in (*named, "train.max_steps")]


def expand_tasks(name: str, data: str | Path) -> list[str]:
    """`glue` as all of its tasks that can be trained on what lies in `data`; any other name as itself."""
    if name != "glue":
        return [name]
    found = glue.tasks_in(Path(data))
    usable = [f"glue/{task}" for task, is_usable in found.items() if is_usable]
    if not usable:
        raise UserError(f"{data} holds the folder of no task of GLUE, such as SST-2, with a file to train on")
    for task in (task for task, is_usable in found.items() if not is_usable):
        warn(f"glue/{task} is left out: its folder in {data} has no file to train on")
    return usable


def preflight_task(settings: Settings, data: str | Path, run: str | Path, *, init: str, world: int) -> None:
    """Refuse what can be refused before anything is written or any rank is started."""
    preflight(settle_task(settings, data, run, init=init, world=world), data, run, init=init, world=world)


def settle_task(settings: Settings, data: str | Path, run: str | Path, *, init: str, world: int = 0) -> Settings:
    """The settings of a run whose model, length and bins follow from its task, its data and its weights."""
    task = open_task(data, settings, _words(settings, run, init))
    begun = Run.open(run).settings if (Path(run) / "config.json").is_file() else None
    _check_target(settings.evaluate.target_accuracy, task)
    block = task.training().block
    settings = replace(settings, model=_model_for(task, settings.model, begun, init))
    settings = _in_steps(settings, len(settings.data.rows(len(block))), float(block.lengths.mean()))
    if settings.batch.token_budget == 0:
        budget = begun.batch.token_budget if begun else usual_budget(settings, block.lengths, world)
        settings = replace(settings, batch=replace(settings.batch, token_budget=budget))
    return settings.check()


def _words(settings: Settings, run: str | Path, init: str) -> Vocabulary:
    words = words_for(settings, run, init)
    assert words is not None
    return words


def read_unanswered(settings: Settings, data: str | Path, run: str | Path, *, init: str) -> None:
    """Read what is to be predicted after the training, so that what is wrong with it is said before."""
    forget_task()
    open_task(data, settings, _words(settings, run, init)).unanswered()


def _check_target(target: float, task: Task) -> None:
    """Refuse a target that is meant in the other of two measures: SQuAD's figures are in percent, all others shares."""
    is_percent = task.head == "span"
    if is_percent and 0 < target <= 1:
        raise UserError(f"evaluate.target_accuracy is {target:g}, and the figures of {task.name} are in percent")
    if not is_percent and target > 1:
        raise UserError(f"evaluate.target_accuracy is {target:g}, and the figures of {task.name} are 1 at the most")


def _model_for(task: Task, asked: ModelSettings, begun: Settings | None, init: str) -> ModelSettings:
    there = begun.model if begun else open_source(init).settings
    if there is None:
        raise UserError(f"no bert_config.json (or config.json) lies beside {init}; put it there")
    usual = ModelSettings()
    for name in ARCHITECTURE:
        wish, made = getattr(asked, name), getattr(there, name)
        if wish not in (made, getattr(usual, name)):
            whose = "the run that is there has" if begun else f"the weights of {init} have"
            raise UserError(f"model.{name} is {wish}, and {whose} {made}; leave it out")
    model = replace(asked, **{name: getattr(there, name) for name in ARCHITECTURE})
    return replace(model, head=task.head, num_labels=max(2, len(task.labels)))


def _in_steps(settings: Settings, num_rows: int, mean_length: float) -> Settings:
    """What was said in passes over the data, in steps and examples."""
    train, evaluate, batch = settings.train, settings.evaluate, settings.batch
    if train.epochs:
        steps = train.epochs * num_rows / (batch.sequences or batch.tokens / mean_length)
        train = replace(train, max_steps=max(1, math.ceil(steps - 1e-9)))
    return replace(settings, train=train, evaluate=in_examples(evaluate, num_rows))


def usual_budget(settings: Settings, lengths: Any, world: int) -> int:
    """Tokens of a bin that holds a rank's share of nearly every step, so that little of it is junk."""
    longest = min(settings.data.max_seq_length, int(lengths.max()))
    ranks = world or parallel.count_ranks()
    if settings.batch.tokens:
        needed = settings.batch.tokens / ranks + longest
    else:
        count = settings.batch.sequences
        spread = math.sqrt(count) * float(lengths.std())
        # Among several ranks a step should make as many bins as there are ranks, neither more nor fewer.
        most = count * float(lengths.mean()) + (DEVIATIONS if ranks == 1 else DEVIATIONS_AMONG_RANKS) * spread
        needed = most / ranks
    budget = max(min(int(needed), MOST_AT_ONCE), settings.data.max_seq_length)
    return -(-budget // BUDGET_STEP) * BUDGET_STEP


# --- several runs -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What the runs of one task, one for each seed, came to."""

    task: str
    seeds: tuple[int, ...]
    figures: dict[str, tuple[float, ...]]
    """One for each seed."""
    keeps_best: bool = False
    """Whether they are of each run's best evaluation, whose checkpoint it keeps, instead of the last."""

    def mean(self, name: str) -> float:
        return statistics.fmean(self.figures[name])

    def deviation(self, name: str) -> float:
        """Of a sample; 0 of a single run."""
        return statistics.stdev(self.figures[name]) if len(self.seeds) > 1 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Means, deviations and all values, for JSON."""
        return {
            "task": self.task,
            "seeds": list(self.seeds),
            "evaluation": "best" if self.keeps_best else "last",
            "figures": {
                name: {"mean": self.mean(name), "deviation": self.deviation(name), "values": list(values)}
                for name, values in self.figures.items()
            },
        }


def finetune_many(
    settings: Mapping[str, Settings],
    data: str | Path,
    run: str | Path,
    *,
    init: str,
    seeds: Sequence[int],
) -> list[Outcome]:
    """Fine-tune for each task and seed, each into a folder of its own under `run`; what is done already is not redone.

    `settings` are by task. The table is also written to `results.json` there, after every run.
    """
    forget_task()
    if len(settings) > 1:  # what is wrong with the last of them is not to be found out after hours
        for name, of_task in settings.items():
            place = run_folder(run, name, seeds[0], len(settings), len(seeds))
            settle_task(of_task, data, place, init=init)
            open_task(data, of_task, _words(of_task, place, init)).held_out()
    outcomes: list[Outcome] = []
    for name, of_task in settings.items():
        found: list[dict[str, float]] = []
        for seed in seeds:
            place = run_folder(run, name, seed, len(settings), len(seeds))
            seeded = replace(of_task, train=replace(of_task.train, seed=seed))
            _finetune(seeded, data, place, init)
            found.append(figures_of(place))
            names = [key for key in found[0] if all(key in figures for figures in found)]
            figures = {key: tuple(one[key] for one in found) for key in names}
            outcome = Outcome(name, tuple(seeds[: len(found)]), figures, checkpoint_of(place) == "best")
            if parallel.is_first_process():
                write_results([*outcomes, outcome], Path(run) / RESULTS)
        outcomes.append(outcome)
    return outcomes


def write_results(outcomes: Sequence[Outcome], path: Path) -> None:
    """Write the table for programs; it can be made again from the runs, so no run ends for its sake."""
    try:
        write_atomically(path, json.dumps([one.to_dict() for one in outcomes], indent=1) + "\n")
    except OSError as error:
        warn(f"could not write {path}: {error.strerror or error}; the runs themselves are whole")


def table(outcomes: Sequence[Outcome]) -> str:
    """The outcomes as text: each task's figures, mean and deviation over seeds, and how fast it trained.

    Of several tasks of GLUE their average comes last, each task's figures being one of them by their mean.
    """
    width = max(len(outcome.task) for outcome in outcomes)
    lines, means = [], []
    for outcome in outcomes:
        seeds = f" ({len(outcome.seeds)} seeds)" if len(outcome.seeds) > 1 else ""
        scores = [name for name in outcome.figures if not name.rpartition("/")[2].startswith(ABOUT_SPEED)]
        shown = [
            f"{name} {outcome.mean(name):.4g}" + (f" +- {outcome.deviation(name):.2g}" if seeds else "")
            for name in scores
        ]
        best = "  at the best evaluation" if outcome.keeps_best else ""
        speed = f"  {outcome.mean(SPEED):,.0f} sentences/s" if SPEED in outcome.figures else ""
        speed += f", {outcome.mean(SPEED_OVERALL):,.0f} over all" if SPEED_OVERALL in outcome.figures else ""
        lines.append(f"{outcome.task:<{width}}{seeds}  {'  '.join(shown)}{best}{speed}")
        means += [statistics.fmean(outcome.mean(name) for name in scores)] if scores else []
    if len(means) > 1 and all(outcome.task.startswith("glue/") for outcome in outcomes):
        lines.append(f"{'average':<{width}}  {statistics.fmean(means):.4g} of {len(means)} tasks")
    return "\n".join(lines)


def run_folder(run: str | Path, task: str, seed: int, num_tasks: int, num_seeds: int) -> Path:
    """Where one run of several lies: RUN, RUN/seed-1, RUN/mnli or RUN/mnli/seed-1."""
    place = Path(run) / task.rpartition("/")[2] if num_tasks > 1 else Path(run)
    return place / f"seed-{seed}" if num_seeds > 1 else place


def checkpoint_of(run: str | Path) -> str:
    """Which checkpoint of a run its figures are of: the best if it keeps that, else the newest."""
    return "newest" if checkpoint.read_best(Run.open(run).checkpoints) is None else "best"


def figures_of(run: str | Path) -> dict[str, float]:
    """A run's figures, by its last evaluation or, if it keeps the best, by that; and how fast it trained."""
    records = read_records(Path(run) / "metrics.jsonl")
    best = checkpoint.read_best(Run.open(run).checkpoints)
    evaluations = [one for one in records if isinstance(one, EvaluationRecord) and best in (None, one.step)]
    last = evaluations[-1].metrics if evaluations else {}
    return {name: value for name, value in last.items() if math.isfinite(value)} | training_speed(records)


def training_speed(records: Sequence[Record]) -> dict[str, float]:
    """Sentences that a run trained on each second: in a usual step, and over all of it, by the clock of train.budget:
    from the first step on, evaluation and what saving takes of it included."""
    steps = [record for record in records if isinstance(record, StepRecord) and not record.skipped]
    if len(steps) < 2:
        return {}
    per_step = (steps[-1].samples - steps[0].samples) / (len(steps) - 1)
    speed = {SPEED: per_step / statistics.median(step.duration for step in steps)}
    end = records[-1]
    if isinstance(end, EndRecord) and end.loop_seconds > 0:
        speed[SPEED_OVERALL] = end.samples / end.loop_seconds
    return speed


# --- a run that is there ------------------------------------------------------------------------------------


def evaluate_task(
    run: str | Path,
    data: str | Path | None = None,
    *,
    which: str = "newest",
    device: Literal["auto", "cpu", "cuda"] = "auto",
    at_once: int = 0,
    overrides: Sequence[tuple[str, str]] = (),
) -> dict[str, float]:
    """The task's figures of a fine-tuned run on the held-out part of `data` (its own, without any), and its step.

    `overrides` are of settings that do not shape the training, such as ("task.null_threshold", "2"), or that say how
    other files are read: task.on_error, task.text, task.text_pair, task.label.
    """
    with _opened(run, data, which, device, at_once, overrides) as it:
        held_out = it.task.held_out()
        if not held_out:
            raise UserError(f"{it.folder} has nothing with known answers to score {run} on")
        it.say_notes()
        evaluator = TaskEvaluator(it.task, held_out, it.settings, it.folder, it.words)
        return {"step": float(it.step)} | evaluator.evaluate(it.predict, it.ranks)


def predict(
    run: str | Path,
    data: str | Path,
    out: str | Path,
    *,
    which: str = "newest",
    device: Literal["auto", "cpu", "cuda"] = "auto",
    at_once: int = 0,
    overrides: Sequence[tuple[str, str]] = (),
) -> dict[str, Any]:
    """Answer what in `data` has no answers yet (or else its held-out part), into files in the folder `out`.

    `overrides` as in `evaluate_task`. Returns the files and how fast it was, by split.
    """
    _refuse_own_place(Path(data), Path(out))
    with _opened(run, data, which, device, at_once, overrides) as it:
        splits: Mapping[str, Split] = it.task.unanswered() or it.task.without_answers()
        if not splits:
            raise UserError(f"{it.folder} holds nothing to predict")
        it.say_notes()
        evaluator = TaskEvaluator(it.task, splits, it.settings, it.folder, it.words)
        result: dict[str, Any] = {}
        for name, split in splits.items():
            outputs, timing = evaluator.outputs(split, it.predict, it.ranks)
            if it.ranks.is_first:
                # Files of SQuAD's have the same names whatever they answer.
                folder = Path(out) / name if len(splits) > 1 and it.task.head == "span" else Path(out)
                result[name] = {"files": _write_predictions(split, outputs, folder)} | timing
        return result


def _refuse_own_place(data: Path, out: Path) -> None:
    """Refuse to write answers where they would take the place of what they answer."""
    places = [data, data / HUB] if data.is_dir() else [data.parent] if data.suffix == ".jsonl" else []
    if out.is_dir() and any(place.is_dir() and out.samefile(place) for place in places):
        raise UserError(f"--out {out} is where --data lies, and answers could take its place; choose another --out")


def _write_predictions(split: Split, outputs: Outputs, out: Path) -> list[str]:
    try:
        out.mkdir(parents=True, exist_ok=True)
        return [str(file) for file in split.write_predictions(outputs, out)]
    except OSError as error:
        raise UserError(f"could not write predictions into {out}: {error.strerror or error}") from None


@dataclass(frozen=True)
class _OpenRun:
    task: Task
    settings: Settings
    folder: Path
    words: Vocabulary
    predict: Predictor
    ranks: parallel.Ranks
    step: int

    def say_notes(self) -> None:
        """What was found in the files, once they have been read."""
        for line in self.task.notes if self.ranks.is_first else ():
            remark(line)


@contextmanager
def _opened(
    run: str | Path,
    data: str | Path | None,
    which: str,
    device: Literal["auto", "cpu", "cuda"],
    at_once: int,
    overrides: Sequence[tuple[str, str]],
) -> Iterator[_OpenRun]:
    """A fine-tuned run with a checkpoint of it, ready to answer."""
    forget_task()
    opened = Run.open(run)
    if not opened.settings.task.name:
        raise UserError(f"{run} was pre-trained, not fine-tuned for a task")
    settings = override(opened.settings, list(overrides), also=HOW_FILES_ARE_READ)
    train, evaluate = replace(settings.train, device=device), replace(settings.evaluate, at_once=at_once)
    settings = replace(settings, train=train, evaluate=evaluate)
    chosen, warnings = checkpoint.choose(opened.checkpoints, which)
    for warning in warnings:
        warn(warning)
    if chosen is None:
        raise UserError(f"the run {run} has no whole checkpoint yet")
    folder, words = Path(data) if data is not None else opened.data, opened.vocabulary()
    task = open_task(folder, settings, words, described=opened.task)
    set_precision(train)
    with parallel.join(train) as ranks:
        model = Bert(settings.model).to(ranks.device)
        model.load_state_dict(checkpoint.read_weights(chosen))
        ready = predictor(model, settings, ranks.device)
        yield _OpenRun(task, settings, folder, words, ready, ranks, checkpoint.read_progress(chosen).step)
