"""The commands that pre-train, resume, evaluate and try out a model."""

from __future__ import annotations

import os
from pathlib import Path
from shlex import quote
from typing import Annotated

from typer import Argument, Option

from bertrain.base.errors import UserError
from bertrain.base.formatting import COLUMNS, counted, wrap
from bertrain.base.machine import is_first_rank
from bertrain.cli import options
from bertrain.config import resolve as config
from bertrain.config.settings import Settings

app = options.new_app()

DataFolder = Annotated[
    Path, Option("--data", help="a folder made by `data prepare`, or a folder of HDF5 or TFRecord files")
]


@app.command("pretrain", context_settings=options.OVERRIDES)
@options.takes_settings(options.TRAINING_OPTIONS)
def pretrain(
    recipe: options.RecipeName,
    data: DataFolder,
    overrides: options.Overrides,
    run: Annotated[Path | None, Option(*options.RUN_OPTIONS, help="the run folder to create or continue")] = None,
    settings_file: options.SettingsFile = None,
    init: options.InitialWeights = None,
    nproc: options.RankCount = 1,
    restarts: options.Restarts = 0,
    dry_run: Annotated[bool, Option("--dry-run", help="print the resolved run and stop")] = False,
    benchmark: Annotated[bool, Option("--benchmark", help="time some steps, print the metrics, save nothing")] = False,
    benchmark_steps: Annotated[int | None, Option(min=2, help="steps that --benchmark times; default: 100")] = None,
    warm_up_steps: Annotated[int | None, Option(min=0, help="steps before the timed ones; default: 10")] = None,
    as_json: Annotated[bool, Option("--json", help="with --benchmark: print JSON")] = False,
) -> None:
    """Pre-train BERT; any setting can be given as --section.field VALUE.

    `bertrain recipes` lists the recipes, `bertrain settings` the settings.

    Example: bertrain pretrain bert-tiny --data data/ --run runs/tiny --max-steps 200
    """
    times = {"--benchmark-steps": benchmark_steps, "--warm-up-steps": warm_up_steps, "--json": as_json or None}
    for option in [option for option, value in times.items() if value is not None and not benchmark]:
        raise UserError("option-without-effect", f"{option} needs --benchmark; give both, or leave {option} out")
    if as_json and dry_run:
        raise UserError("conflicting-options", "--dry-run prints no JSON; leave --json out")
    resolved = config.resolve(recipe, overrides, settings_file)
    resolved.refuse_unsettled_task()
    options.prepare_process(resolved.train)
    if dry_run:
        from bertrain.training.announce import dry_run as describe

        shown = describe(resolved, data, run=run, world=options.world(nproc), init=str(init or ""))
        if is_first_rank():
            print(shown)
        return
    if benchmark:
        given = [option for option, value in {"--run": run, "--init": init, "--restarts": restarts}.items() if value]
        if given:
            raise UserError(
                "conflicting-options", f"--benchmark saves nothing and starts from scratch; leave {given[0]} out"
            )
        warm_up = 10 if warm_up_steps is None else warm_up_steps
        _benchmark(resolved, data, nproc, steps=benchmark_steps or 100, warm_up=warm_up, as_json=as_json)
        return
    if run is None:
        raise UserError("missing-option", "--run is missing; give the folder for this run, such as --run runs/first")
    from bertrain.training import start as training

    if options.starts_ranks(nproc, restarts):
        world, here = options.world(nproc), not options.is_launched()
        training.preflight(resolved, data, run, init=str(init or ""), world=world, here=here)
        options.start_ranks(nproc, restarts, [run], settings=resolved, data=[data, *resolved.other_folders()])
    training.pretrain(resolved, data, run, init=str(init or ""))
    _finish(run)


def _benchmark(settings: Settings, data: Path, nproc: int, *, steps: int, warm_up: int, as_json: bool) -> None:
    if options.starts_ranks(nproc):
        options.start_ranks(nproc, settings=settings, data=[data, *settings.other_folders()])
    from bertrain.training.benchmark import benchmark as measure

    with options.stdout_for_json(as_json):
        metrics = measure(settings, data, steps=steps, warm_up=warm_up)
    if not is_first_rank() or options.printed_json(metrics, as_json):
        return
    phases = "  ".join(f"{name} {ms:.2f}" for name, ms in metrics["phase_ms"].items())
    print(f"{metrics['computing_with']} on {metrics['device']}, {counted(metrics['ranks'], 'rank')}")
    print(f"{metrics['ms_per_step']:.2f} ms per step, median of {steps} after {warm_up} ({phases})")
    print(f"{metrics['real_tokens_per_s']:,.0f} real tokens/s, {metrics['sequences_per_s']:,.1f} sequences/s")
    print(f"{metrics['peak_memory_gib']:.1f} GiB at most on the first rank")


@app.command("resume", context_settings=options.OVERRIDES)
@options.takes_settings(options.RESUME_OPTIONS)
def resume(
    run: options.RunFolder,
    overrides: options.Overrides,
    from_step: Annotated[
        int | None, Option(min=0, help="go back to the checkpoint of this step, and move later ones aside")
    ] = None,
    nproc: options.RankCount = 1,
    restarts: options.Restarts = 0,
) -> None:
    """Continue a run from its newest valid checkpoint, on any number of ranks.

    --section.field VALUE changes settings that `bertrain settings` marks with *.

    Example: bertrain resume runs/tiny
    """
    from bertrain.run.folder import Run

    options.prepare_process(config.override(Run.open(run).settings, overrides).train)
    from bertrain.ranks.restart import ROLLED_BACK
    from bertrain.training import start as training

    if options.starts_ranks(nproc, restarts):
        world, here = options.world(nproc), not options.is_launched()
        resolved = training.preflight_resume(run, overrides, from_step=from_step, world=world, here=here)
        settings = resolved.settings

        def go_back() -> None:
            if from_step is not None:
                training.roll_back(run, from_step)
                os.environ[ROLLED_BACK] = "1"

        options.start_ranks(
            nproc, restarts, [run], settings=settings, data=[Run.open(run).data, settings.evaluate.data],
            before=go_back,
        )  # fmt: skip
    training.resume(run, overrides, from_step=from_step)
    _finish(run)


@app.command("anneal", context_settings=options.OVERRIDES)
@options.takes_settings(options.RESUME_OPTIONS)
def anneal(
    source: options.RunFolder,
    run: Annotated[Path, Option(*options.RUN_OPTIONS, help="the run folder to create or continue")],
    steps: Annotated[int, Option(min=1, help="steps of the decay")],
    overrides: options.Overrides,
    checkpoint: options.Checkpoint = "newest",
    data: Annotated[Path | None, Option(help="prepared data; default: the data of the run")] = None,
    nproc: options.RankCount = 1,
    restarts: options.Restarts = 0,
) -> None:
    """Decay the learning rate of a run from one of its checkpoints to zero, in a new run.

    --schedule.decay, --schedule.power and --schedule.floor set the shape of the decay (default: 1-sqrt, to 0), as in
    `bertrain pretrain`. The original run does not change.

    Example: bertrain anneal runs/stable --run runs/annealed --steps 1000
    """
    from bertrain.run.folder import Run

    changeable = [(key, value) for key, value in overrides if not key.startswith("schedule.")]
    options.prepare_process(config.override(Run.open(source).settings, changeable).train)
    from bertrain.training import anneal as annealing
    from bertrain.training.start import preflight

    if options.starts_ranks(nproc, restarts):
        wanted = annealing.resolve_annealing(source, run, steps, which=checkpoint, data=data, overrides=overrides)
        world, here = options.world(nproc), not options.is_launched()
        preflight(wanted.settings, wanted.data, run, init=wanted.init, world=world, here=here)
        read: list[Path | str] = [wanted.data, *wanted.settings.other_folders()]
        options.start_ranks(nproc, restarts, [run], settings=wanted.settings, data=read)
    annealing.anneal(source, run, steps, which=checkpoint, data=data, overrides=overrides)
    _finish(run)


@app.command("evaluate", context_settings=options.OVERRIDES)
@options.takes_settings(options.TASK_OPTIONS)
def evaluate(
    run: options.RunOrTransformers,
    overrides: options.Overrides,
    data: Annotated[
        Path | None,
        Option(help="prepared data; for a fine-tuned run, the data of its task (default: the run's held-out data)"),
    ] = None,
    checkpoint: options.Checkpoint = "newest",
    max_examples: Annotated[int, Option(min=0, help="examples to use, evenly spaced; 0: all")] = 0,
    batch_size: options.BatchSize = 0,
    device: options.Device = "auto",
    nproc: options.RankCount = 1,
    as_json: options.AsJson = False,
) -> None:
    """Print loss and accuracy of a model on held-out data, or the metrics of a fine-tuned model's task.

    For a fine-tuned run, --section.field VALUE changes the names of columns, and settings that `bertrain settings`
    marks with *.

    Example: bertrain evaluate runs/tiny --data held-out/
    """
    from bertrain.base.console import evaluation_text
    from bertrain.training.prediction_settings import prediction_settings

    settings = prediction_settings(run)
    if options.starts_ranks(nproc):
        options.start_ranks(nproc, settings=settings, data=[data] if data else [])
    if settings.task.name:
        from bertrain.training.evaluate import refuse_max_examples
        from bertrain.training.predict import evaluate_task

        refuse_max_examples(max_examples)
        with options.stdout_for_json(as_json):
            result = evaluate_task(
                run, data, which=checkpoint, device=device, batch_size=batch_size, overrides=overrides
            )
    else:
        from bertrain.training.evaluate import evaluate as evaluate_run

        task_options = [*(["--batch-size"] if batch_size else []), *(f"--{key}" for key, _ in overrides)]
        if task_options:
            raise UserError(
                "finetuning-only", f"{task_options[0]} is for fine-tuned runs, and {run} is not one; leave it out"
            )
        with options.stdout_for_json(as_json):
            result = evaluate_run(run, data, which=checkpoint, max_examples=max_examples, device=device)
    if not is_first_rank() or options.printed_json(result, as_json):
        return
    report, _ = result.pop("report", ""), result.pop("by_class", None)
    step = f" at step {result['step']:.0f}" if "step" in result else ""
    examples = f"{result.pop('examples'):,.0f} examples"
    where, text = f"{run}{step}, {examples}:", evaluation_text(result)
    fits = len(where) + len(text.partition("\n")[0]) < COLUMNS
    print(where, wrap(text), sep=" " if fits else "\n  ")
    if "latency_ms_p50" in result:
        print(options.latency_text(result))
    if report:
        print(f"\n{report}")


@app.command("fill-mask")
def fill_mask(
    source: options.AnyWeights,
    sentences: Annotated[list[str], Argument(metavar="SENTENCE...", help="text with one or more [MASK]")],
    top: Annotated[int, Option(min=1, help="guesses for each mask")] = 5,
    device: options.Device = "auto",
    as_json: options.AsJson = False,
) -> None:
    """Predict the masked words of sentences.

    Example: bertrain fill-mask runs/tiny "the capital of france is [MASK] ."
    """
    from bertrain.training.fill_mask import fill_mask as fill

    filled = fill(source, sentences, top=top, device=device)
    if options.printed_json(filled, as_json):
        return
    for sentence, masks in zip(sentences, filled, strict=True):
        print(sentence)
        for guesses in masks:
            print("  " + "  ".join(f"{guess.word} {guess.probability:.1%}" for guess in guesses))


def _finish(run: Path) -> None:
    """The last line: the result, and the next command to type; printed by the first rank."""
    from bertrain.run.folder import TRAIN_PLAN, Run

    if is_first_rank() and (run.absolute().parent / TRAIN_PLAN).is_file():
        print(f"done: {run}; next: the same `bertrain train` command again, which writes the report and the model")
    elif is_first_rank():
        settings, words = Run.open(run).settings, '"a sentence with a [MASK] ."'
        on = f" --data {quote(settings.evaluate.data)}" if settings.evaluate.data else ""
        command, rest = ("evaluate", on) if settings.evaluates else ("fill-mask", f" {words}")
        done, following = f"done: {run}", f"next: bertrain {command} {quote(str(run))}{rest}"
        print(wrap(done), following, sep="; " if len(done) + len(following) + 2 <= COLUMNS else "\n")
