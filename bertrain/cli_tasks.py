"""The verbs about tasks to fine-tune for, each a thin skin over one Python function of `bertrain.tasks`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from bertrain.cli_data import AsJson


def add_task_verbs(app: typer.Typer) -> None:
    """Give the command line the verbs of this module."""
    app.command()(score)


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
