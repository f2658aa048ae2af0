"""Score predictions that are in a file, whoever made them, by the official rules of their task."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from bertrain.base.errors import UserError, nearest
from bertrain.tasks.squad.files import read_json_file, read_squad
from bertrain.tasks.squad.scoring import score_squad
from bertrain.tasks.squad.task import squad_version


def score(
    task: str,
    data: str | Path,
    predictions: str | Path,
    *,
    null_odds: str | Path | None = None,
    null_threshold: float = 1.0,
) -> dict[str, float]:
    """The official figures of a file of predictions on the file of a task's questions and answers.

    `null_odds` (squad/v2.0) is the file that says how likely each question is to have no answer; a prediction whose
    odds exceed `null_threshold` counts as none.
    """
    prefix = task.partition("/")[0]
    if prefix not in SCORERS:
        raise UserError(f"there are no rules to score {task!r} by{nearest(prefix, list(SCORERS))}")
    null_odds_file = None if null_odds is None else Path(null_odds)
    return SCORERS[prefix](task, Path(data), Path(predictions), null_odds_file, null_threshold)


def _score_squad(
    task: str, data: Path, predictions: Path, null_odds: Path | None, null_threshold: float
) -> dict[str, float]:
    version = squad_version(task)
    if null_odds and version == "v1.1":
        raise UserError("--null-odds is for squad/v2.0; in squad/v1.1 every question has an answer")
    collection = read_squad(data, version)
    if not collection.is_answered:
        raise UserError(f"{data} has no answers to score by")
    given = _read_by_question(predictions, "an answer's text", lambda value: isinstance(value, str))
    odds = None if null_odds is None else _read_by_question(null_odds, "a number", _is_finite_number)
    identifiers = [question.id for question in collection.questions]
    if not any(identifier in given for identifier in identifiers):
        raise UserError(f"{predictions} predicts none of the questions of {data}; it belongs to another file")
    if odds is not None and (without := [identifier for identifier in identifiers if identifier not in odds]):
        raise UserError(f"{null_odds} has no odds for {len(without):,} questions of {data}, such as {without[0]}")
    return score_squad(collection, given, version, null_odds=odds, null_threshold=null_threshold)


def _read_by_question(path: Path, meaning: str, is_right: Callable[[Any], bool]) -> dict[str, Any]:
    """A JSON object of question ids and values."""
    content = read_json_file(path)
    if not isinstance(content, dict) or not content:
        raise UserError(f'{path} should be a JSON object, {{"QUESTION-ID": ...}}, with {meaning} for each question')
    for identifier, value in content.items():
        if not is_right(value):
            raise UserError(
                f'{path} should have {meaning} for each question, and has something else for "{identifier}"'
            )
    return content


def _is_finite_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e300 < value < 1e300


SCORERS: dict[str, Callable[[str, Path, Path, Path | None, float], dict[str, float]]] = {"squad": _score_squad}
"""By what stands before the stroke in a task's name."""
