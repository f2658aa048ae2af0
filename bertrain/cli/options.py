"""Options that several commands share: settings on the command line, and ranks to start.

Every command that takes settings (`--section.field VALUE`) is decorated with `takes_settings`, which also gives it the
short options of the table below.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option
from typer.core import TyperGroup

from bertrain.base.errors import UserError
from bertrain.base.formatting import compact
from bertrain.base.isa import cap_isa
from bertrain.base.machine import under_launcher
from bertrain.config import choices
from bertrain.config.recipe import recipe_names
from bertrain.config.resolve import WORDS, describe, parse_overrides, resolve

if TYPE_CHECKING:
    from bertrain.cli.launch import Submission
    from bertrain.config.settings import Settings, TrainSettings

OVERRIDES = {"allow_extra_args": True, "ignore_unknown_options": True}
Overrides = list[tuple[str, str]]
"""Settings from the command line, such as ("train.max_steps", "200")."""

TEXT_COLUMN = "field or column of the text; auto: text, or the only one with long strings"
ENCODING = (
    "encoding, such as latin-1; auto: UTF-8, UTF-16 with a byte order mark, or Windows-1252 if a file reads well in it"
)
AsJson = Annotated[bool, Option("--json", help="print JSON")]
RunFolder = Annotated[Path, Argument(metavar="RUN", help="a run folder")]
RunOrTransformers = Annotated[Path, Argument(metavar="RUN", help="a run folder, or weights in Transformers' format")]
RunOrFineTuned = Annotated[
    Path, Argument(metavar="RUN", help="a run folder, or fine-tuned weights in Transformers' format")
]
RUN_OPTIONS = ("--run", "--run-folder")  # torchrun takes --run for its own, unless it is called with `-m --`
NewFolder = Annotated[Path, Option("--out", help="the folder to create")]
RecipeName = Annotated[
    str, Argument(metavar="RECIPE", help="a recipe's name, or a .toml file", autocompletion=lambda: recipe_names())
]
SettingsFile = Annotated[Path | None, Option("--settings", help="a .toml file that overrides the recipe")]
KNOWN_WEIGHTS = (
    "a run, a Hugging Face folder, a TensorFlow 1 checkpoint, a .pt, .bin or .safetensors file, or hub:NAME (download)"
)
InitialWeights = Annotated[Path | None, Option("--init", help=f"initial weights: {KNOWN_WEIGHTS}")]
AnyWeights = Annotated[Path, Argument(metavar="RUN_OR_WEIGHTS", help=KNOWN_WEIGHTS)]
Checkpoint = Annotated[str, Option("--checkpoint", help="newest, best, or the number of a step")]
Device = Annotated[choices.Device, Option(help="auto: a GPU if there is one")]
RankCount = Annotated[int, Option("--nproc", min=1, help="ranks to start on this machine")]
Restarts = Annotated[
    int,
    Option(min=0, help="restart all ranks after a crash or hang; give up after N restarts without a new checkpoint"),
]
BatchSize = Annotated[
    int,
    Option(min=0, help="for a fine-tuned run: evaluation batch size; latency is reported per batch; 0: a large one"),
]


@dataclass(frozen=True)
class ShortOption:
    """A short name of a setting. A flag takes no value and stands for `flag`."""

    option: str
    setting: str
    help: str
    metavar: str = "VALUE"
    flag: str = ""
    also: dict[str, Overrides] = field(default_factory=dict)
    """Values that stand for several settings."""

    @property
    def name(self) -> str:
        return self.option.removeprefix("--").replace("-", "_")

    def settings(self, value: str | bool | None) -> Overrides:
        """The settings that this option stands for, given what followed it on the command line."""
        if value is None or value is False:
            return []
        text = self.flag if value is True else str(value)
        return self.also.get(text, [(self.setting, text)])


TRAINING_OPTIONS = (
    ShortOption("--max-steps", "train.max_steps", "optimizer steps; in fine-tuning, instead of epochs", "N"),
    ShortOption("--epochs", "train.epochs", "passes over the data, instead of steps", "N"),
    ShortOption("--lr", "optimizer.learning_rate", "learning rate after the warm-up", "RATE"),
    ShortOption("--batch-size", "batch.sequences", "examples in a step, all ranks together", "N"),
    ShortOption("--seed", "train.seed", "seed of example order, masks, dropout and initial weights", "N"),
    ShortOption("--max-samples", "train.max_samples", "stop after N examples", "N"),
    ShortOption("--max-time", "train.max_time", "stop after this time, such as 1h30m", "TIME"),
    ShortOption("--budget", "train.budget", "fit the whole schedule into this time, such as 20m", "TIME"),
    ShortOption("--skip-steps", "train.skip_steps", "skip these steps, such as 1200-1210,1300", "STEPS"),
    ShortOption(
        "--precision",
        "train.precision",
        "auto, fp32, tf32, bf32, bf16, fp16, fp8; avx-fp32 (Intel's name): fp32 without AMX",
        "FORMAT",
        also={"avx-fp32": [("train.precision", "fp32"), ("train.isa", "avx512")]},
    ),
    ShortOption("--isa", "train.isa", "newest CPU instructions: auto, avx2, avx512, amx", "ISA"),
    ShortOption("--activation-checkpointing", "train.activation_checkpointing", "none, selective or full", "KIND"),
    ShortOption(
        "--deterministic",
        "train.deterministic",
        "make a resumed run bitwise equal to an uninterrupted one",
        flag="true",
    ),
    ShortOption("--telemetry", "log.telemetry", "sample clocks, power, temperature and energy", flag="true"),
    ShortOption("--quiet", "log.level", "print only warnings and the end", flag="quiet"),
    ShortOption("--verbose", "log.level", "print more about each step", flag="verbose"),
)
SIZED_OPTIONS = tuple(one for one in TRAINING_OPTIONS if one.setting not in ("train.budget", "train.skip_steps"))
FIXED_SETTINGS = {entry["name"] for entry in describe() if entry["shapes_training"]}
RESUME_OPTIONS = tuple(option for option in TRAINING_OPTIONS if option.setting not in FIXED_SETTINGS)
TASK_OPTIONS = (ShortOption("--on-error", "task.on_error", "at a damaged row of the data: stop or skip", "ACTION"),)


def takes_settings(short_options: Sequence[ShortOption] = ()) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let a command take settings as --section.field VALUE and as short options; it receives both as `overrides`."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def with_overrides(context: typer.Context, **arguments: Any) -> None:
            given = [pair for option in short_options for pair in option.settings(arguments.pop(option.name))]
            words = list(context.args)
            for name in [name for name, value in arguments.items() if isinstance(value, list)]:
                arguments[name], taken = split_settings(arguments[name])
                words += taken
            overrides = parse_overrides(words, options_of(context.command))
            command(overrides=join_overrides(overrides, given), **arguments)

        own = inspect.signature(command, eval_str=True).parameters
        parameters = [
            inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context),
            *(one for one in own.values() if one.name != "overrides"),
            *(_parameter(option) for option in short_options),
        ]
        return with_parameters(with_overrides, parameters)

    return decorate


def with_parameters(command: Callable[..., None], parameters: Sequence[inspect.Parameter]) -> Callable[..., None]:
    """The command with these parameters instead of `**arguments`, as Typer sees it; each is given by its name."""
    named = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in parameters]
    command.__dict__["__signature__"] = inspect.Signature(named)
    command.__annotations__ = {one.name: one.annotation for one in named}
    return command


def options_of(command: Any) -> list[str]:
    """The names of a command's options, such as --out."""
    return [
        "--help",
        *(name for one in command.params for name in (*one.opts, *one.secondary_opts) if name[:2] == "--"),
    ]


def refuse_misspelled(command: Any, words: Sequence[str]) -> None:
    """Refuse the first word that looks like an option and is none: it may be why a required one is missing."""
    options = options_of(command)
    for word in words:
        if word[:2] == "--" and len(word) > 2 and "." not in word and word.partition("=")[0] not in options:
            parse_overrides([word], options)


def brief_help(context: Any) -> str:
    """What a command does and requires; shown if it is called without arguments."""
    formatter = context.make_formatter()
    command = context.command
    command.format_usage(context, formatter)
    command.format_help_text(context, formatter)
    required = [one.get_help_record(context) for one in command.params if one.required]
    if required:
        with formatter.section("Required"):
            formatter.write_dl(required)
    return f"{formatter.getvalue()}\nAll options: {context.command_path} --help"


def split_settings(values: list[Any]) -> tuple[list[Any], list[str]]:
    """The values of an argument that takes any number of words, and the settings that it took for its own."""
    kept, taken, rest = [], [], iter(values)
    for value in rest:
        if str(value).startswith("--"):
            taken += [str(value), *([] if "=" in str(value) else map(str, itertools.islice(rest, 1)))]
        else:
            kept.append(value)
    return kept, taken


def _parameter(option: ShortOption) -> inspect.Parameter:
    help = f"{option.setting}: {option.help}"
    annotation: Any = Annotated[str | None, Option(option.option, metavar=option.metavar, help=help)]
    if option.flag:
        annotation = Annotated[bool, Option(option.option, help=help)]
    default = False if option.flag else None
    return inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def join_overrides(long: Overrides, short: Overrides) -> Overrides:
    """Settings given as --section.field VALUE, of which the last one counts, and by short options.

    Refuses a setting that a short option sets to another value.
    """
    lengths = dict(short).keys() & {"train.budget", "train.max_steps", "train.epochs"}
    if len(lengths) > 1:
        raise UserError(
            "conflicting-options", f"{' and '.join(sorted(lengths))} each set the length of the run; give one"
        )
    values = dict(long)
    for key, value in short:
        if values.setdefault(key, value) != value:
            raise UserError("conflicting-options", f"{key} is given twice, as {values[key]} and as {value}; give one")
    return [*long, *short]


class Commands(TyperGroup):
    """Commands whose help is not cut; those of the whole program stand under headings."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        shown = {name: command for name, command in self.commands.items() if not command.hidden}
        headings = WORDS["headings"] if ctx.parent is None else {}
        listed = {name: heading for heading, names in headings.items() for name in names.split() if name in shown}
        listed |= {name: "Commands" for name in shown if name not in listed}
        for heading, names in itertools.groupby(listed, key=listed.__getitem__):
            with formatter.section(heading):
                formatter.write_dl([(name, shown[name].get_short_help_str(limit=1000)) for name in names])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        groups = [group for group, commands in self.commands.items() if name in getattr(commands, "commands", ())]
        advice = WORDS["commands"].get(name) or ", or ".join(f"type bertrain {group} {name}" for group in groups)
        if ctx.parent is None and name not in self.commands and advice:
            raise UserError("unknown-command", f"there is no command {name!r}; {advice}")
        return super().resolve_command(ctx, args)


def new_app(name: str | None = None, help: str | None = None, **options: Any) -> typer.Typer:
    """An empty set of commands; one with a `name` is a group of its own."""
    options = {"no_args_is_help": name is not None, "rich_markup_mode": None, "cls": Commands} | options
    return typer.Typer(name=name, help=help, **options)


def printed_json(result: Any, as_json: bool) -> bool:
    """Print a result as JSON if asked to, dataclasses by their fields; returns whether it did."""
    if as_json:
        print(json.dumps(result, default=asdict))
    return as_json


_launch: ContextVar[Submission | None] = ContextVar("launch", default=None)


@contextmanager
def launching(launch: Submission) -> Iterator[None]:
    """Let the commands that are called meanwhile check themselves as always, and submit a job instead of starting."""
    before = _launch.set(launch)
    try:
        yield
    finally:
        _launch.reset(before)


def is_launched() -> bool:
    """Whether the command will run elsewhere, so that this machine's hardware does not count."""
    return _launch.get() is not None


def world(nproc: int) -> int:
    """The number of ranks that `start_ranks` will start."""
    launch = _launch.get()
    return launch.world if launch else nproc


def starts_ranks(nproc: int, restarts: int = 0) -> bool:
    """Whether the command is to check itself, then call `start_ranks`, rather than to do its work in this process."""
    return (is_launched() or nproc > 1 or restarts > 0) and not under_launcher()


@contextmanager
def stdout_for_json(as_json: bool) -> Iterator[None]:
    """With --json, send what is printed inside, by libraries too, to stderr: stdout is for the JSON alone."""
    if not as_json:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        ctypes.CDLL(None).fflush(None)  # what C libraries have buffered
        os.dup2(kept, 1)
        os.close(kept)


def prepare_process(train: TrainSettings) -> None:
    """Set what torch's libraries read when they are loaded: instruction set, memory allocator, OpenMP runtime."""
    if is_launched():
        return
    from bertrain.ranks.preload import start_again

    start_again(train.device, train.allocator, train.openmp)
    cap_isa(train.isa)


def cap_instructions(overrides: Overrides) -> None:
    """Set the instruction set that the command line asks for, for commands that resolve settings with torch loaded."""
    if not is_launched():
        cap_isa(resolve("bert-tiny", [pair for pair in overrides if pair[0] == "train.isa"]).train.isa)


def start_ranks(
    nproc: int,
    restarts: int | None = None,
    runs: Sequence[Path] = (),
    *,
    settings: Settings | None = None,
    data: Sequence[Path | str] = (),
    tasks: Sequence[Sequence[str]] = (),
    before: Callable[[], None] = lambda: None,
) -> None:
    """Run this same command as several ranks, and exit as they do; a new checkpoint in one of `runs` is progress.

    Under `bertrain launch` the ranks are those of a job, whose nodes are checked by `settings` and `data` first.
    `tasks` are words to add to the command, if the job is to run it several times. `before` is called once before the
    ranks start or the job is submitted, but not for a dry run.
    """
    launch = _launch.get()
    if launch is not None:
        if nproc > 1:
            raise UserError(
                "conflicting-options", "--nproc is for one machine; use --procs-per-node of `bertrain launch` instead"
            )
        commands = [[*sys.argv[1:], *words] for words in tasks or [[]]]
        launch.submit(commands, runs, restarts or 0, settings, [Path(path) for path in data if path], before)
        raise SystemExit(0)
    from bertrain.launch.local import run_ranks

    before()

    def steps_saved() -> int:
        from bertrain.run.checkpoint import step_of, whole_checkpoints

        newest = [whole_checkpoints(run / "checkpoints")[-1:] for run in runs]
        return sum(step_of(path) for paths in newest for path in paths)

    raise SystemExit(run_ranks(nproc, sys.argv[1:], restarts=restarts, progress=steps_saved))


def latency_text(metrics: dict[str, Any]) -> str:
    found = {name.rpartition("_")[2]: value for name, value in metrics.items() if name.startswith("latency_ms_")}
    return f"a batch took {', '.join(f'{compact(value)} ms ({name})' for name, value in found.items())}"
