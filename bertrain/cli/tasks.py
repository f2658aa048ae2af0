"""The verbs about tasks to fine-tune for, each a thin skin over one Python function of `bertrain.tasks`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from bertrain.base.errors import UserError
from bertrain.base.isa import cap_isa
from bertrain.cli.data import AsJson
from bertrain.cli.options import (
    OVERRIDES,
    Device,
    Instructions,
    MaxTime,
    OnError,
    Precision,
    RankCount,
    Restarts,
    RunFolder,
    all_given,
    given,
    given_precision,
    is_first_rank,
    prepare_process,
    start_ranks,
    under_launcher,
)
from bertrain.cli.weights import Checkpoint


def add_task_verbs(app: typer.Typer) -> None:
    """Give the command line the verbs of this module."""
    app.command(context_settings=OVERRIDES)(finetune)
    app.command(context_settings=OVERRIDES)(predict)
    app.command()(score)


def finetune(
    context: typer.Context,
    task: Annotated[
        str, typer.Argument(metavar="TASK", help="glue/mnli and its like, glue, squad/v1.1, squad/v2.0, xnli, classify")
    ],
    data: Annotated[Path, typer.Option(help="the folder with the task's files")],
    run: Annotated[Path, typer.Option(help="the run folder to make or continue")],
    init: Annotated[
        Path | None, typer.Option(help="the run, or weights of any form that `weights show` knows, to fine-tune")
    ] = None,
    do: Annotated[
        Literal["train", "predict"],
        typer.Option(
            help="train: train and score; predict: then answer what has no answers, or else the held-out part, into "
            "RUN/predictions"
        ),
    ] = "train",
    recipe: Annotated[str, typer.Option(help="a recipe's name, or a .toml file; default: the task's")] = "",
    settings_file: Annotated[Path | None, typer.Option("--settings", help="a .toml file laid over the recipe")] = None,
    seeds: Annotated[str, typer.Option(help="several runs, such as 1,2,3: their mean and deviation")] = "",
    nproc: RankCount = 1,
    restarts: Restarts = 0,
    max_steps: Annotated[str | None, typer.Option("--max-steps", metavar="N", help="instead of train.epochs")] = None,
    max_time: MaxTime = None,
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget", metavar="TIME", help="instead of train.epochs: so long, such as 20m, warm-up 50 steps"
        ),
    ] = None,
    precision: Precision = None,
    isa: Instructions = None,
    deterministic: Annotated[bool, typer.Option("--deterministic", help="bitwise equal when resumed")] = False,
    activation_checkpointing: Annotated[
        str | None,
        typer.Option("--activation-checkpointing", metavar="WHAT", help="none, selective or full"),
    ] = None,
    on_error: OnError = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the resolved run and stop")] = False,
    as_json: AsJson = False,
) -> None:
    """Fine-tune weights for a task, and score them; any setting can be given as --section.field VALUE.

    `glue` alone is all tasks whose folders are there. With --seeds each run has a folder of its own under RUN.

    Example: bertrain finetune glue/sst2 --init weights/ --data glue/ --run runs/sst2
    """
    options = given(
        max_steps=max_steps, max_time=max_time, budget=budget, activation_checkpointing=activation_checkpointing
    )
    options += given_precision(precision, isa)
    if on_error:
        options.append(("task.on_error", on_error))
    if deterministic:
        options.append(("train.deterministic", "true"))
    overrides = all_given(context.args, options)
    if as_json:
        overrides.insert(0, ("log.level", "quiet"))
    cap_isa(dict(overrides).get("train.isa", "auto"))  # type: ignore[arg-type]  # what it is not, settings refuse below
    from bertrain.training import finetune as tuning

    resolved = {
        name: tuning.resolve_task(name, overrides, recipe=recipe, settings_file=settings_file)
        for name in tuning.expand_tasks(task, data)
    }
    prepare_process(next(iter(resolved.values())).train)
    beginning = str(init.resolve()) if init else ""
    numbers = parse_seeds(seeds) or [next(iter(resolved.values())).train.seed]
    places = {
        name: [tuning.run_folder(run, name, seed, len(resolved), len(numbers)) for seed in numbers] for name in resolved
    }
    if dry_run:
        from bertrain.training.announce import dry_run as describe

        for name, settings in resolved.items():
            settled = tuning.settle_task(settings, data, places[name][0], init=beginning, world=nproc)
            print(describe(settled, data, world=nproc, init=beginning))
        return
    if (nproc > 1 or restarts) and not under_launcher():
        for name, settings in resolved.items():
            tuning.preflight_task(settings, data, places[name][0], init=beginning, world=nproc)
        start_ranks(nproc, restarts, [place for several in places.values() for place in several])
    for name, settings in resolved.items() if do == "predict" else ():
        tuning.read_to_predict(settings, data, places[name][0], init=beginning)
    outcomes = tuning.finetune_many(resolved, data, run, init=beginning, seeds=numbers)
    shown = [one.to_dict() for one in outcomes]
    if do == "predict":
        for one in shown:
            one["predictions"] = {
                str(place): tuning.predict(place, data, place / "predictions", which=tuning.checkpoint_of(place))
                for place in places[one["task"]]
            }
    if not is_first_rank():
        return
    if as_json:
        print(json.dumps(shown))
        return
    for one in shown:
        for result in one.get("predictions", {}).values():
            show_predictions(result)
    print(tuning.table(outcomes))


def parse_seeds(text: str) -> list[int]:
    """1,2,3 as numbers; none of nothing."""
    try:
        found = [int(word) for word in text.split(",")] if text else []
    except ValueError:
        raise UserError(f"--seeds is a list of whole numbers such as 1,2,3, not {text!r}") from None
    if any(seed < 0 for seed in found) or len(set(found)) < len(found):
        raise UserError(f"--seeds {text} names a seed twice, or one below 0")
    return found


def predict(
    context: typer.Context,
    run: RunFolder,
    data: Annotated[Path, typer.Option(help="the folder, or the file, with what is to be answered")],
    out: Annotated[Path, typer.Option(help="the folder to write the predictions to")],
    checkpoint: Checkpoint = "newest",
    device: Annotated[Device, typer.Option(help="auto: a GPU if there is one")] = "auto",
    at_once: Annotated[
        int, typer.Option(min=0, help="examples in a batch, of which latency is told; 0: as many as are fast")
    ] = 0,
    on_error: OnError = None,
    as_json: AsJson = False,
) -> None:
    """Let a fine-tuned run answer what has no answers yet, in its task's official form.

    Settings that do not shape the training, and the names of columns, can be given as --section.field VALUE.

    Example: bertrain predict runs/sst2 --data glue/ --out predictions/
    """
    from bertrain.training.finetune import predict as answer

    overrides = all_given(context.args, [("task.on_error", on_error)] if on_error else [])
    result = answer(run, data, out, which=checkpoint, device=device, at_once=at_once, overrides=overrides)
    if as_json and is_first_rank():
        print(json.dumps(result))
    elif is_first_rank():
        show_predictions(result)


def show_predictions(result: dict[str, Any]) -> None:
    for name, split in result.items():
        speed = f"{split['examples']:,.0f} examples, {split['examples_per_s']:,.0f} a second"
        print(f"{name}: {speed}; {latency_text(split)}; wrote {', '.join(split['files'])}")


def latency_text(figures: dict[str, Any]) -> str:
    """Percentiles of the time that a batch took."""
    found = {name.rpartition("_")[2]: value for name, value in figures.items() if name.startswith("latency_ms_")}
    return f"a batch took {', '.join(f'{value:.3g} ms ({name})' for name, value in found.items())}"


def score(
    task: Annotated[str, typer.Argument(metavar="TASK", help="squad/v1.1 or squad/v2.0")],
    data: Annotated[Path, typer.Option(help="the file of questions and answers, such as dev-v1.1.json")],
    predictions: Annotated[Path, typer.Option(help="the file of predictions: question ids and answers, in JSON")],
    null_odds: Annotated[
        Path | None, typer.Option(help="squad/v2.0: how likely each question is to have no answer, to find thresholds")
    ] = None,
    null_threshold: Annotated[
        float, typer.Option(help="with --null-odds: beyond it a prediction counts as no answer; 1 as in SQuAD's script")
    ] = 1.0,
    as_json: AsJson = False,
) -> None:
    """Score a file of predictions by the official rules of its task, to the last digit.

    Example: bertrain score squad/v1.1 --data dev-v1.1.json --predictions predictions.json
    """
    from bertrain.tasks.score import score as score_predictions

    figures = score_predictions(task, data, predictions, null_odds=null_odds, null_threshold=null_threshold)
    if as_json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        print(f"{name}: {value}")
    if figures.get("missing"):
        print(f"{figures['missing']:,} questions have no prediction, and count as wrong")
