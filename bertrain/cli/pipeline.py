"""The verb that does everything: `bertrain train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, get_args

from typer import Argument, Option

from bertrain.base.errors import UserError
from bertrain.base.machine import is_first_rank
from bertrain.cli.options import (
    ENCODING,
    OVERRIDES,
    SIZED_OPTIONS,
    TEXT_COLUMN,
    InitialWeights,
    Overrides,
    is_launched,
    new_app,
    prepare_process,
    start_ranks,
    takes_settings,
)
from bertrain.config.choices import DocumentEnd, OnError
from bertrain.config.resolve import resolve

pipeline_app = new_app()

SIZES = "auto, tiny, mini, small, medium, base or large; auto: the largest that learns enough in the budget"


@pipeline_app.command("train", context_settings=OVERRIDES)
@takes_settings(SIZED_OPTIONS)
def train(
    text: Annotated[
        list[Path], Argument(metavar="TEXT...", help="files or folders: text, JSONL, Parquet, CSV, datasets, dumps")
    ],
    out: Annotated[Path, Option("--out", help="the folder to create, or to continue in")],
    overrides: Overrides,
    budget: Annotated[
        str, Option(help="training time, such as 30m; preparing the text and --task come on top")
    ] = "30m",
    eval_share: Annotated[str, Option("--eval", help="share of the documents to hold out, such as 5%")] = "5%",
    cased: Annotated[bool, Option("--cased", help="keep capitals and accents")] = False,
    language: Annotated[str, Option(help="for splitting sentences, such as de; auto: guessed")] = "auto",
    init: InitialWeights = None,
    size: Annotated[str, Option(help=SIZES)] = "auto",
    task: Annotated[str, Option(help="then fine-tune: classify=FILE, a table with columns text and label")] = "",
    text_column: Annotated[str, Option(help=TEXT_COLUMN)] = "auto",
    encoding: Annotated[str, Option(help=ENCODING)] = "auto",
    document_end: Annotated[DocumentEnd, Option(help="end of a document in plain text")] = "auto",
    on_error: Annotated[
        OnError, Option(help="at bytes that are not in the encoding, or a damaged record: stop, or skip and count them")
    ] = "stop",
    nproc: Annotated[int, Option(min=0, help="ranks to start; 0: one for each GPU, or one on a CPU")] = 0,
    dry_run: Annotated[bool, Option("--dry-run", help="print what would be chosen, and stop")] = False,
) -> None:
    """Train a BERT on your text: one command from files to a model, a report and a Transformers folder.

    Every choice is printed with its reason; any setting can be given as --section.field VALUE. If it is interrupted,
    the same command continues.

    Example: bertrain train articles/ --out my-bert --budget 30m
    """
    from bertrain.pipeline.plan import Size

    if not text:
        raise UserError("missing-input", "name the files or folders of the text to train on")
    if size not in get_args(Size):
        raise UserError("invalid-value", f"--size is {size!r}; use {SIZES.partition(';')[0]}")
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
