"""The commands that drive whole runs: `bertrain train` and `bertrain sweep`."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Annotated, Any, get_args

from typer import Argument, Option

from bertrain.base.errors import UserError
from bertrain.base.formatting import counted, few
from bertrain.base.machine import is_first_rank
from bertrain.cli.options import (
    ENCODING,
    OVERRIDES,
    SIZED_OPTIONS,
    TASK_OPTIONS,
    TEXT_COLUMN,
    TRAINING_OPTIONS,
    AsJson,
    InitialWeights,
    Overrides,
    SettingsFile,
    cap_instructions,
    is_launched,
    new_app,
    prepare_process,
    printed_json,
    start_ranks,
    stdout_for_json,
    takes_settings,
)
from bertrain.cli.tasks import parse_seeds
from bertrain.config.choices import DocumentEnd, OnError, Size
from bertrain.config.resolve import resolve

pipeline_app = new_app()

SIZES = f"{', '.join(get_args(Size)[1:])}; auto: the largest that learns enough in the budget"


@pipeline_app.command("train", context_settings=OVERRIDES)
@takes_settings(SIZED_OPTIONS)
def train(
    text: Annotated[
        list[Path], Argument(metavar="TEXT...", help="files or folders: text, JSONL, Parquet, CSV, datasets, dumps")
    ],
    out: Annotated[Path, Option("--out", help="the folder to create, or to continue in")],
    overrides: Overrides,
    budget: Annotated[
        str, Option(help="training time, such as 30m; preparing the text and --task take extra time")
    ] = "30m",
    eval_share: Annotated[str, Option("--eval", help="share of the documents to hold out, such as 5%")] = "5%",
    cased: Annotated[bool, Option("--cased", help="keep case and accents")] = False,
    language: Annotated[str, Option(help="language for splitting sentences, such as de; auto: detected")] = "auto",
    init: InitialWeights = None,
    size: Annotated[Size, Option(help=SIZES)] = "auto",
    task: Annotated[str, Option(help="also fine-tune: classify=FILE, a table with the columns text and label")] = "",
    text_column: Annotated[str, Option(help=TEXT_COLUMN)] = "auto",
    encoding: Annotated[str, Option(help=ENCODING)] = "auto",
    document_end: Annotated[DocumentEnd, Option(help="end of a document in plain text")] = "auto",
    on_error: Annotated[
        OnError, Option(help="at invalid bytes or a damaged record: stop, or skip and count them")
    ] = "stop",
    nproc: Annotated[int, Option(min=0, help="ranks to start; 0: one for each GPU, or one on a CPU")] = 0,
    dry_run: Annotated[bool, Option("--dry-run", help="print what would be chosen, and stop")] = False,
) -> None:
    """Train a BERT on your text: one command from files to a model, a report and a Transformers folder.

    Every choice is printed with its reason; any setting can be given as --section.field VALUE. If the
    command is interrupted, run it again to continue.

    Example: bertrain train articles/ --out my-bert --budget 30m
    """
    if not text:
        raise UserError("missing-input", "name the files or folders of the text to train on")
    prepare_process(resolve("bert-tiny", [pair for pair in overrides if pair[0].startswith("train.")]).train)
    from bertrain.pipeline import train as pipeline

    wishes: dict[str, Any] = {
        "budget": budget, "evaluation_share": parse_share(eval_share), "cased": cased, "language": language,
        "init": init or "", "size": size, "task": task, "text_column": text_column, "encoding": encoding,
        "document_end": document_end, "on_error": on_error, "overrides": overrides, "nproc": nproc,
    }  # fmt: skip
    if dry_run:
        print("\n".join(pipeline.dry_run(text, out, **wishes)))
        return
    if is_launched():
        pipeline.check(text, out, **wishes)
        start_ranks(max(1, nproc), runs=[out / "run"], data=text)
    made = pipeline.train(text, out, **wishes)
    if is_first_rank():
        print("\n".join(["", *pipeline.summary(made)]))


def parse_share(text: str) -> float:
    """A share such as 5% or 0.05."""
    try:
        return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        raise UserError("invalid-value", f"--eval is {text!r}; give a share such as 5%") from None


@pipeline_app.command("sweep", context_settings=OVERRIDES)
@takes_settings((*TRAINING_OPTIONS, *TASK_OPTIONS))
def sweep(
    what: Annotated[str, Argument(metavar="RECIPE_OR_TASK", help="a recipe for `pretrain`, or a task for `finetune`")],
    data: Annotated[Path, Option(help="prepared data, or the folder with the task's files")],
    out: Annotated[
        Path, Option("--out", help="the folder to create, or to continue in; it gets a folder for each run")
    ],
    overrides: Overrides,
    grid: Annotated[
        list[str] | None,
        Option(metavar="SETTING=VALUE,VALUE", help="a setting and its values; repeatable: all combinations are run"),
    ] = None,
    seeds: Annotated[
        str, Option(help="run each combination with several seeds: their number, such as 3, or a list, such as 5,6,7")
    ] = "",
    at_once: Annotated[int, Option(min=0, help="most runs at the same time; 0: as many as cores and memory allow")] = 0,
    init: InitialWeights = None,
    settings_file: SettingsFile = None,
    dry_run: Annotated[bool, Option("--dry-run", help="check all runs, print their names, and stop")] = False,
    as_json: AsJson = False,
) -> None:
    """Train with every combination of some settings and rank the results; several runs at once if memory allows.

    Other settings, given as --section.field VALUE, apply to all runs. A run that fails does not stop the others. If
    the sweep is interrupted, the same command continues.

    Example: bertrain sweep bert-tiny --data data/ --out sweep --grid optimizer.learning_rate=1e-4,2e-4 --seeds 3
    """
    if is_launched():
        raise UserError("not-launchable", "a sweep starts its runs itself; run it on one machine, without a launcher")
    if as_json and dry_run:
        raise UserError(
            "conflicting-options", "--dry-run has no results to print as JSON; leave one of --json and --dry-run out"
        )
    cap_instructions(overrides)
    from bertrain.pipeline import sweep as sweeping
    from bertrain.pipeline.sweep_results import print_results

    wishes: dict[str, Any] = {
        "grid": parse_grid(grid or []), "seeds": count_seeds(seeds), "init": init or "", "overrides": overrides,
        "settings_file": settings_file,
    }  # fmt: skip
    if dry_run:
        print("\n".join(sweeping.dry_run(out, sweeping.make_request(what, data, **wishes), at_once)))
        return
    with stdout_for_json(as_json):
        found = sweeping.sweep(what, data, out, **wishes, at_once=at_once)
    if not printed_json(found.to_dict(), as_json):
        print_results(found)
    if found.failed:
        ended = f"{counted(len(found.failed), 'run')} failed: {few(found.failed)}"
        raise UserError("failed-runs", f"{ended}; the others are done; run the same command to try these again")


def parse_grid(words: list[str]) -> dict[str, list[str]]:
    """Values by setting, from SETTING=VALUE,VALUE; quotes protect a comma inside a value."""
    grid: dict[str, list[str]] = {}
    for word in words:
        key, _, text = word.partition("=")
        values = next(csv.reader([text], skipinitialspace=True), [])
        if not values or "" in values:
            form = "SETTING=VALUE,VALUE, such as optimizer.learning_rate=1e-4,2e-4"
            raise UserError("bad-grid", f"--grid is {word!r}; write {form}")
        if key in grid:
            raise UserError("conflicting-options", f"--grid {key} is given twice; write its values in one list")
        grid[key] = values
    return grid


def count_seeds(text: str) -> list[int]:
    """The seeds 1, 2, 3 for 3; or those in a list such as 5,6,7."""
    seeds = parse_seeds(text)
    return list(range(1, seeds[0] + 1)) if seeds and "," not in text else seeds
