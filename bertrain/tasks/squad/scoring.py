"""Exact match and F1 of answers, as SQuAD's two official scripts define them.

An answer counts for what is left of it without case, punctuation, articles and the width of spaces; of several right
answers the nearest counts. The scripts of v1.1 and v2.0 differ where nothing is left, and in the names of figures.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Collection as Some
from collections.abc import Mapping

from bertrain.tasks.squad.files import Collection, Version

ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)

Scores = dict[str, float]
"""What each question's prediction is worth, from 0 to 1, in the order of the file."""


def score_squad(
    collection: Collection,
    predictions: Mapping[str, str],
    version: Version,
    *,
    null_odds: Mapping[str, float] | None = None,
    null_threshold: float = 1.0,
) -> dict[str, float]:
    """The figures of the official script, in percent. A question without a prediction is wrong, and is counted.

    `null_odds` (v2.0) say how likely it is that a question has no answer: beyond `null_threshold` its prediction counts
    as none, and the thresholds are found that would have been best.
    """
    exact, f1 = {}, {}
    for question in collection.questions:
        truths = {normalize(answer.text) for answer in question.answers}
        prediction = predictions.get(question.id)
        given = None if prediction is None else normalize(prediction)
        exact[question.id], f1[question.id] = (0.0, 0.0) if given is None else score_answer(given, truths, version)
    counts = {"total": len(exact), "missing": sum(identifier not in predictions for identifier in exact)}
    if version == "v1.1":
        return {"exact_match": 100.0 * _added_up(exact) / len(exact), "f1": 100.0 * _added_up(f1) / len(f1)} | counts

    answerable = {question.id: bool(question.answers) for question in collection.questions}
    figures = _figures_with_and_without_answer(exact, f1, answerable, null_odds or {}, null_threshold) | counts
    if null_odds is not None:
        for name, scores in (("exact", exact), ("f1", f1)):
            best, threshold = best_threshold(scores, predictions, null_odds, answerable)
            figures |= {f"best_{name}": best, f"best_{name}_thresh": threshold}
    return figures


def normalize(answer: str) -> str:
    """What of an answer is compared: lower case, without ASCII punctuation and articles, single spaces."""
    return " ".join(ARTICLES.sub(" ", answer.lower().translate(PUNCTUATION)).split())


def score_answer(given: str, truths: Some[str], version: Version) -> tuple[float, float]:
    """Exact match and F1 of a normalized answer against the normalized true ones; none of these: it has no answer.

    In v2.0 a true answer of which nothing is left does not count, and two empty answers are the same.
    """
    if version == "v1.1":
        return float(given in truths), max(map(_overlap, [given] * len(truths), truths), default=0.0)
    truths = [truth for truth in truths if truth] or [""]
    if not given or truths == [""]:
        return float(given in truths), float(given in truths)
    return float(given in truths), max(map(_overlap, [given] * len(truths), truths))


def _overlap(given: str, truth: str) -> float:
    """F1 of the words of two normalized answers."""
    given_words, true_words = given.split(), truth.split()
    common = (Counter(given_words) & Counter(true_words)).total()
    if not common:
        return 0.0
    precision, recall = common / len(given_words), common / len(true_words)
    return (2 * precision * recall) / (precision + recall)


def _added_up(scores: Scores) -> float:
    """Their plain sum, one after another: Python's own is more exact from 3.12 on, and differs in the last digit."""
    total = 0.0
    for score in scores.values():
        total += score
    return total


def _figures_with_and_without_answer(
    exact: Scores, f1: Scores, answerable: Mapping[str, bool], null_odds: Mapping[str, float], threshold: float
) -> dict[str, float]:
    """v2.0's figures: of all questions, and of those with and without an answer apart."""
    figures: dict[str, float] = {}
    withheld = {identifier for identifier in exact if null_odds.get(identifier, 0.0) > threshold}
    parts = {"": list(exact)}
    for prefix, wanted in (("HasAns_", True), ("NoAns_", False)):
        parts[prefix] = [identifier for identifier in exact if answerable[identifier] is wanted]
    for prefix, part in parts.items():
        if not part:
            continue
        for name, scores in (("exact", exact), ("f1", f1)):
            counted = {one: float(not answerable[one]) if one in withheld else scores[one] for one in part}
            figures[prefix + name] = 100.0 * _added_up(counted) / len(part)
        if prefix:
            figures[prefix + "total"] = len(part)
    return figures


def best_threshold(
    scores: Scores, predictions: Mapping[str, str], null_odds: Mapping[str, float], answerable: Mapping[str, bool]
) -> tuple[float, float]:
    """The best figure that withholding the less likely answers could have reached, and the threshold that reaches it.

    From withholding all answers on, one after another is given, the surest first.
    """
    current = best = float(sum(not answerable[identifier] for identifier in scores))
    threshold = 0.0
    for identifier in sorted((one for one in null_odds if one in scores), key=lambda one: null_odds[one]):
        if answerable[identifier]:
            current += scores[identifier]
        elif predictions.get(identifier):
            current -= 1
        if current > best:
            best, threshold = current, null_odds[identifier]
    return 100.0 * best / len(scores), threshold
