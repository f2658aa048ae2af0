"""The only door: one verb per sub-command, each a thin skin over one Python function.

Nothing heavy is imported before a verb needs it, so that --help answers at once.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer

from bertrain import __version__
from bertrain.base.errors import (
    EXIT_LOST_RANK,
    EXIT_USER_ERROR,
    AgreedError,
    LostRankError,
    ReportedElsewhereError,
    UserError,
)
from bertrain.cli import reports
from bertrain.cli.data import AsJson, data_app
from bertrain.cli.launch import launch_app
from bertrain.cli.mlperf import mlperf_app
from bertrain.cli.options import (
    OVERRIDES,
    Device,
    Instructions,
    MaxSamples,
    MaxTime,
    OnError,
    Precision,
    RankCount,
    Restarts,
    RunFolder,
    SkipSteps,
    all_given,
    given,
    given_precision,
    is_first_rank,
    prepare_process,
    start_ranks,
    under_launcher,
)
from bertrain.cli.profile import profile_app
from bertrain.cli.tasks import add_task_verbs, latency_text
from bertrain.cli.weights import AnyWeights, Checkpoint, weights_app
from bertrain.config import resolve as config
from bertrain.config.settings import Settings

EXIT_INTERRUPTED = 130
UsageError: Any = typer.BadParameter.__base__  # click's own, wherever this version of typer keeps it

app = typer.Typer(
    help="Train BERT: text to data, pre-training, fine-tuning, evaluation and weights.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(data_app, name="data")
app.add_typer(weights_app, name="weights")
app.add_typer(mlperf_app, name="mlperf")
app.add_typer(profile_app, name="profile")
app.add_typer(launch_app, name="launch")

DataFolder = Annotated[
    Path, typer.Option("--data", help="a folder made by `bertrain data prepare`, or one of HDF5 or TFRecord files")
]


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="print the version and exit")] = False,
) -> None:
    if version:
        print(__version__)
        raise typer.Exit


@app.command(context_settings=OVERRIDES)
def pretrain(
    context: typer.Context,
    recipe: Annotated[str, typer.Argument(help="a recipe's name, or a .toml file")],
    data: DataFolder,
    run: Annotated[Path | None, typer.Option(help="the run folder to make or continue")] = None,
    settings_file: Annotated[Path | None, typer.Option("--settings", help="a .toml file laid over the recipe")] = None,
    init: Annotated[
        Path | None, typer.Option(help="a run, or weights of any form that `weights show` knows, to begin with")
    ] = None,
    nproc: RankCount = 1,
    restarts: Restarts = 0,
    max_steps: Annotated[str | None, typer.Option("--max-steps", metavar="N", help="train.max_steps")] = None,
    max_samples: MaxSamples = None,
    max_time: MaxTime = None,
    budget: Annotated[
        str | None,
        typer.Option("--budget", metavar="TIME", help="train.budget: the schedule ends with it, such as 20m"),
    ] = None,
    skip_steps: SkipSteps = None,
    precision: Precision = None,
    isa: Instructions = None,
    deterministic: Annotated[bool, typer.Option("--deterministic", help="bitwise equal when resumed")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the resolved run and stop")] = False,
    benchmark: Annotated[
        bool, typer.Option("--benchmark", help="time some steps, print the figures, keep nothing")
    ] = False,
    benchmark_steps: Annotated[int, typer.Option(min=2, help="steps that --benchmark times")] = 100,
    warm_up_steps: Annotated[int, typer.Option(min=0, help="steps before those")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="with --benchmark: print JSON")] = False,
    telemetry: Annotated[
        bool, typer.Option("--telemetry", help="log.telemetry: clocks, power, temperature and energy beside the steps")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="say only warnings and the end")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="say more about each step")] = False,
) -> None:
    """Pre-train BERT; any setting can be given as --section.field VALUE.

    `bertrain recipes` lists the recipes, `bertrain settings` every setting.

    Example: bertrain pretrain bert-tiny --data data/ --run runs/tiny --train.max_steps 200
    """
    options = given(
        max_steps=max_steps, max_samples=max_samples, max_time=max_time, budget=budget, skip_steps=skip_steps
    )
    options += given_precision(precision, isa)
    if telemetry:
        options.append(("log.telemetry", "true"))
    if deterministic:
        options.append(("train.deterministic", "true"))
    if quiet and verbose:
        raise UserError("--quiet and --verbose contradict each other; choose one")
    if quiet or verbose:
        options.append(("log.level", "quiet" if quiet else "verbose"))
    overrides = all_given(context.args, options)
    if budget and max_steps:
        raise UserError("--budget sets the number of steps itself; leave --max-steps out")
    resolved = config.resolve(recipe, overrides, settings_file)
    resolved.refuse_unsettled_task()
    prepare_process(resolved.train)
    if dry_run:
        from bertrain.training.announce import dry_run as describe

        shown = describe(resolved, data, world=nproc, init=str(init or ""))
        if is_first_rank():
            print(shown)
        return
    if benchmark:
        for option, value in (("--run", run), ("--init", init), ("--restarts", restarts)):
            if value:
                raise UserError(f"--benchmark keeps nothing and begins with fresh weights; leave {option} out")
        _benchmark(resolved, data, nproc, steps=benchmark_steps, warm_up=warm_up_steps, as_json=as_json)
        return
    if run is None:
        raise UserError("--run is missing: the folder this run is kept in, for example --run runs/first")
    from bertrain.training import start

    beginning = str(init or "")
    if (nproc > 1 or restarts) and not under_launcher():
        start.preflight(resolved, data, run, init=beginning, world=nproc)
        start_ranks(nproc, restarts, [run])
    finish(run, start.pretrain(resolved, data, run, init=beginning).step)


def _benchmark(settings: Settings, data: Path, nproc: int, *, steps: int, warm_up: int, as_json: bool) -> None:
    if nproc > 1 and not under_launcher():
        start_ranks(nproc)
    from bertrain.training.benchmark import benchmark as measure

    figures = measure(settings, data, steps=steps, warm_up=warm_up)
    if not is_first_rank():
        return
    if as_json:
        print(json.dumps(figures))
        return
    phases = "  ".join(f"{name} {ms:.2f}" for name, ms in figures["phase_ms"].items())
    print(f"{figures['computing_with']} on {figures['device']}, {figures['ranks']} rank(s)")
    print(f"{figures['ms_per_step']:.2f} ms a step, median of {steps} after {warm_up} ({phases})")
    print(f"{figures['real_tokens_per_s']:,.0f} real tokens/s, {figures['sequences_per_s']:,.1f} sequences/s")
    print(f"{figures['peak_memory_gib']:.1f} GiB at most on the first rank")


@app.command(context_settings=OVERRIDES)
def resume(
    context: typer.Context,
    run: RunFolder,
    from_step: Annotated[
        int | None, typer.Option(min=0, help="go back to the checkpoint of this step; later ones are put aside")
    ] = None,
    max_samples: MaxSamples = None,
    max_time: MaxTime = None,
    skip_steps: SkipSteps = None,
    nproc: RankCount = 1,
    restarts: Restarts = 0,
) -> None:
    """Continue a run from its newest whole checkpoint, on any number of ranks.

    Settings that do not shape the training can be given anew as --section.field VALUE.

    Example: bertrain resume runs/tiny
    """
    from bertrain.run.folder import Run

    overrides = all_given(context.args, given(max_samples=max_samples, max_time=max_time, skip_steps=skip_steps))
    opened = Run.open(run)
    prepare_process(config.override(opened.settings, overrides).train)
    from bertrain.ranks.restart import ROLLED_BACK
    from bertrain.training import start

    if (nproc > 1 or restarts) and not under_launcher():
        start.preflight_resume(run, overrides, from_step=from_step, world=nproc)
        if from_step is not None:
            start.roll_back(run, from_step)
            os.environ[ROLLED_BACK] = "1"
        start_ranks(nproc, restarts, [run])
    finish(run, start.resume(run, overrides, from_step=from_step).step)


@app.command(context_settings=OVERRIDES)
def evaluate(
    context: typer.Context,
    run: RunFolder,
    data: Annotated[
        Path | None,
        typer.Option(help="a folder made by `bertrain data prepare`; of a fine-tuned run its task's, or its own"),
    ] = None,
    checkpoint: Checkpoint = "newest",
    max_examples: Annotated[int, typer.Option(min=0, help="examples to use, evenly strided; 0: all")] = 0,
    at_once: Annotated[
        int, typer.Option(min=0, help="of a fine-tuned run: examples in a batch, of which latency is told; 0: many")
    ] = 0,
    on_error: OnError = None,
    device: Annotated[Device, typer.Option(help="auto: a GPU if there is one")] = "auto",
    as_json: AsJson = False,
) -> None:
    """Loss and accuracy of a run on held-out data; of a fine-tuned one, its task's figures.

    Of a fine-tuned run, settings that do not shape the training, and the names of columns, can be given as
    --section.field VALUE.

    Example: bertrain evaluate runs/tiny --data held-out/
    """
    from bertrain.base.console import evaluation_text
    from bertrain.run.folder import Run

    overrides = all_given(context.args, [("task.on_error", on_error)] if on_error else [])
    if Run.open(run).settings.task.name:
        from bertrain.training.predict import evaluate_task

        if max_examples:
            raise UserError("--max-examples is for pre-training; a task is scored on the whole of its held-out part")
        result = evaluate_task(run, data, which=checkpoint, device=device, at_once=at_once, overrides=overrides)
    else:
        from bertrain.training.evaluate import evaluate as evaluate_run

        if data is None:
            raise UserError("--data is missing: the prepared folder to evaluate on")
        for option in (*(["--at-once"] if at_once else []), *(f"--{key}" for key, _ in overrides)):
            raise UserError(f"{option} is for fine-tuned runs, and {run} was pre-trained")
        result = evaluate_run(run, data, which=checkpoint, max_examples=max_examples, device=device)
    if not is_first_rank():
        return
    if as_json:
        print(json.dumps(result))
    else:
        print(f"{run} at step {result['step']:.0f}, {result['examples']:,.0f} examples: {evaluation_text(result)}")
        if "latency_ms_p50" in result:
            print(latency_text(result))


@app.command("fill-mask")
def fill_mask(
    source: AnyWeights,
    sentences: Annotated[list[str], typer.Argument(metavar="SENTENCE...", help="text with one [MASK] or more")],
    top: Annotated[int, typer.Option(min=1, help="guesses for each mask")] = 5,
    as_json: AsJson = False,
) -> None:
    """Guess the masked words of a sentence.

    Example: bertrain fill-mask runs/tiny "the capital of france is [MASK] ."
    """
    from dataclasses import asdict

    from bertrain.tasks.fill_mask import fill_mask as fill

    filled = fill(source, sentences, top=top)
    if as_json:
        print(json.dumps([[[asdict(guess) for guess in mask] for mask in masks] for masks in filled]))
        return
    for sentence, masks in zip(sentences, filled, strict=True):
        print(sentence)
        for guesses in masks:
            print("  " + "  ".join(f"{guess.word} {guess.probability:.1%}" for guess in guesses))


add_task_verbs(app)
for verb in (reports.report, reports.watch, reports.logs):
    app.command()(verb)


@app.command()
def recipes(
    name: Annotated[str | None, typer.Argument(help="print this recipe whole")] = None,
    as_json: AsJson = False,
) -> None:
    """List the recipes, or print one.

    Example: bertrain recipes bert-large-phase1
    """
    if name is not None:
        print(json.dumps(config.resolve(name).to_dict(), indent=1) if as_json else config.recipe_text(name), end="")
        return
    headlines = {recipe: config.recipe_text(recipe).split("\n")[0].lstrip("# ") for recipe in config.recipe_names()}
    if as_json:
        print(json.dumps(headlines))
        return
    width = max(map(len, headlines))
    for recipe, headline in headlines.items():
        print(f"{recipe:<{width}} {headline}")


@app.command()
def settings(
    section: Annotated[str | None, typer.Argument(help="only this section")] = None,
    as_json: AsJson = False,
) -> None:
    """List every setting with its default and what it means.

    Example: bertrain settings optimizer
    """
    described = config.describe(section)
    if as_json:
        print(json.dumps(described))
        return
    for entry in described:
        print(
            f"--{entry['name']} ({entry['default']!r}){'' if entry['shapes_training'] else ' *'}\n    {entry['help']}"
        )
    print("\n* may be changed when a run is resumed")


@app.command()
def doctor(
    folder: Annotated[Path, typer.Argument(help="where runs will be written")] = Path("."),
    as_json: AsJson = False,
) -> None:
    """Say what this machine has, what will be used of it and why, and what is missing.

    Example: bertrain doctor
    """
    from dataclasses import asdict

    from bertrain.base.doctor import doctor as examine

    findings = examine(folder)
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings]))
        return
    for finding in findings:
        print(f"{finding.verdict:<8}{finding.subject:<11}{finding.found}\n{'':<19}{finding.consequence}")


def finish(run: Path, step: int) -> None:
    """The last line: what was made, and what to type next. Said once, by the first rank."""
    if is_first_rank():
        print(f"done: {run} after step {step}; next: bertrain evaluate {quote(str(run))} --data DIR")


def main() -> None:
    """Run the command line; base/errors.py has the exit codes."""
    try:
        _run()
    except SystemExit as ended:
        code = ended.code or 0
        if not under_launcher() or not isinstance(code, int):
            raise
        # gloo's threads still let go of tensors, for which they want the interpreter; one that is being taken down ends
        # them in an abort (torch 2.13: 5 of some 80 runs on busy cores), and the exit code would be lost.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run() -> None:
    # Threads that wait by spinning take the core from whoever else is on the machine: with another busy process on
    # two cores, training ran at 6,000 tokens/s spinning and at 21,000 sleeping; alone, at 24,000 and 21,000.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        code = app(prog_name="bertrain", standalone_mode=False)
    except UsageError as error:
        message = error.format_message()
        if message.startswith("Usage:"):  # no verb was given: this is the help text
            print(message)
            raise SystemExit(0) from None
        where = f"; see `{error.ctx.command_path} --help`" if error.ctx else ""
        print(f"bertrain: {message.rstrip('.')}{where}", file=sys.stderr)
        raise SystemExit(EXIT_USER_ERROR) from None
    except UserError as error:
        is_ours_to_say = not isinstance(error, AgreedError) or is_first_rank()
        if is_ours_to_say and not isinstance(error, ReportedElsewhereError):
            print(f"bertrain: {error} [{error.code}]", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    except LostRankError as error:
        print(f"bertrain: {error}", file=sys.stderr)
        raise SystemExit(EXIT_LOST_RANK) from None
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    if code == EXIT_INTERRUPTED:  # typer catches the interrupt in some versions
        print("bertrain: interrupted; what was saved before stays", file=sys.stderr)
        raise SystemExit(EXIT_USER_ERROR)
    raise SystemExit(code)
