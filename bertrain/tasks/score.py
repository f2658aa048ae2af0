"""Score a file of predictions, from any program, by the official rules of its task."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from bertrain.base.errors import UserError, nearest
from bertrain.base.files import read_json
from bertrain.base.schema import is_number
from bertrain.tasks.squad.files import read_squad
from bertrain.tasks.squad.scoring import score_squad
from bertrain.tasks.squad.task import VERSIONS


def score(
    task: str,
    data: str | Path,
    predictions: str | Path,
    *,
    null_odds: str | Path | None = None,
    null_threshold: float | None = None,
) -> dict[str, float]:
    """The official metrics of a file of predictions, against the file with the questions and answers of a task.

    `null_odds` (squad/v2.0) is a file with a score of each question for having no answer; a prediction counts as empty
    where that exceeds `null_threshold`, by default 1 as in SQuAD's script.
    """
    if task not in VERSIONS:
        only = f"only {' and '.join(VERSIONS)} have a scorer{nearest(task, list(VERSIONS))}"
        raise UserError("unknown-task", f"cannot score {task!r}; {only}")
    version = VERSIONS[task]
    if (null_odds or null_threshold is not None) and version == "v1.1":
        option = "--null-odds" if null_odds else "--null-threshold"
        reason = "is for squad/v2.0, not v1.1, where every question has an answer"
        raise UserError("option-without-effect", f"{option} {reason}; leave it out")
    if null_threshold is not None and not null_odds:
        raise UserError(
            "option-without-effect", "--null-threshold needs --null-odds; give both, or leave --null-threshold out"
        )
    collection = read_squad(Path(data), version)
    if not collection.has_answers:
        raise UserError("no-answers", f"{data} has no answers to compare with; use the development set")
    answers = _read_by_question(Path(predictions), "an answer text", lambda value: isinstance(value, str))
    odds = None if null_odds is None else _read_by_question(Path(null_odds), "a finite number", is_number)
    ids = [question.id for question in collection.questions]
    if not any(question in answers for question in ids):
        raise UserError("other-predictions", f"{predictions} answers none of the questions in {data}")
    if odds is not None and (missing := [question for question in ids if question not in odds]):
        count = f"{len(missing):,} questions"
        raise UserError("missing-odds", f"{null_odds} has no value for {count} of {data}, such as {missing[0]}")
    threshold = 1.0 if null_threshold is None else null_threshold
    return score_squad(collection, answers, version, null_odds=odds, null_threshold=threshold)


def _read_by_question(path: Path, meaning: str, is_valid: Callable[[Any], bool]) -> dict[str, Any]:
    content = read_json(path)
    if not isinstance(content, dict) or not content:
        raise UserError(
            "bad-predictions", f'{path} is not a JSON object {{"QUESTION-ID": ...}} with {meaning} for each question'
        )
    invalid = next((question for question, value in content.items() if not is_valid(value)), None)
    if invalid is not None:
        raise UserError("bad-predictions", f'{path} has a value for question "{invalid}" that is not {meaning}')
    return content
