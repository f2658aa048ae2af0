"""Exact match and F1 of answers, as SQuAD's two official scripts define them.

Answers are compared after normalization: lower case, no punctuation, no articles, single spaces. Of several correct
answers the closest counts. The scripts of v1.1 and v2.0 differ for empty answers and in the names of the metrics.
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

Scores = dict[str, float]  # the score of each question from 0 to 1, by id, in the order of the file


def score_squad(
    collection: Collection,
    predictions: Mapping[str, str],
    version: Version,
    *,
    null_odds: Mapping[str, float] | None = None,
    null_threshold: float = 1.0,
) -> dict[str, float]:
    """The metrics of the official script, in percent, with the best thresholds if `null_odds` are given; see `score`.

    A question without a prediction counts as wrong.
    """
    exact, f1 = {}, {}
    for question in collection.questions:
        truths = {normalize(answer.text) for answer in question.answers}
        prediction = predictions.get(question.id)
        given = None if prediction is None else normalize(prediction)
        exact[question.id], f1[question.id] = (0.0, 0.0) if given is None else score_answer(given, truths, version)
    counts = {"total": len(exact), "missing": sum(identifier not in predictions for identifier in exact)}
    if version == "v1.1":
        return {"exact_match": 100.0 * _plain_sum(exact) / len(exact), "f1": 100.0 * _plain_sum(f1) / len(f1)} | counts

    answerable = {question.id: bool(question.answers) for question in collection.questions}
    odds = {identifier: odd for identifier, odd in (null_odds or {}).items() if identifier in predictions}
    metrics = _metrics_by_answerability(exact, f1, answerable, odds, null_threshold) | counts
    if null_odds is not None:
        for name, scores in (("exact", exact), ("f1", f1)):
            best, threshold = best_threshold(scores, predictions, odds, answerable)
            metrics |= {f"best_{name}": best, f"best_{name}_thresh": threshold}
    return metrics


def normalize(answer: str) -> str:
    """An answer in lower case, without ASCII punctuation and articles, with single spaces."""
    return " ".join(ARTICLES.sub(" ", answer.lower().translate(PUNCTUATION)).split())


def score_answer(given: str, truths: Some[str], version: Version) -> tuple[float, float]:
    """Exact match and F1 of a normalized answer against the normalized true ones, none for an unanswerable question.

    In v2.0, a true answer that normalizes to nothing does not count, and two empty answers match.
    """
    if version == "v2.0":
        truths = [truth for truth in truths if truth] or [""]
        if not given or truths == [""]:
            return float(given in truths), float(given in truths)
    return float(given in truths), max((_word_f1(given, truth) for truth in truths), default=0.0)


def _word_f1(given: str, truth: str) -> float:
    given_words, true_words = given.split(), truth.split()
    common = (Counter(given_words) & Counter(true_words)).total()
    if not common:
        return 0.0
    precision, recall = common / len(given_words), common / len(true_words)
    return (2 * precision * recall) / (precision + recall)


def _plain_sum(scores: Scores) -> float:
    """The sum in order; sum() compensates since Python 3.12, and differs from the official script in the last digit."""
    total = 0.0
    for score in scores.values():
        total += score
    return total


def _metrics_by_answerability(
    exact: Scores, f1: Scores, answerable: Mapping[str, bool], null_odds: Mapping[str, float], threshold: float
) -> dict[str, float]:
    """The metrics of v2.0: of all questions, and of the answerable and unanswerable ones."""
    metrics: dict[str, float] = {}
    withheld = {identifier for identifier in exact if null_odds.get(identifier, 0.0) > threshold}
    for prefix, wanted in (("", (True, False)), ("HasAns_", (True,)), ("NoAns_", (False,))):
        part = [identifier for identifier in exact if answerable[identifier] in wanted]
        if not part:
            continue
        for name, scores in (("exact", exact), ("f1", f1)):
            counted = {one: float(not answerable[one]) if one in withheld else scores[one] for one in part}
            metrics[prefix + name] = 100.0 * _plain_sum(counted) / len(part)
        if prefix:
            metrics[prefix + "total"] = len(part)
    return metrics


def best_threshold(
    scores: Scores, predictions: Mapping[str, str], null_odds: Mapping[str, float], answerable: Mapping[str, bool]
) -> tuple[float, float]:
    """The best possible metric over all null thresholds, and that threshold.

    Starts from all predictions withheld, and adds them in the order of their null odds. A missing one stays wrong.
    """
    current = best = float(sum(not answerable[identifier] for identifier in scores if identifier in predictions))
    threshold = 0.0
    for identifier in sorted((one for one in null_odds if one in scores), key=lambda one: null_odds[one]):
        if answerable[identifier]:
            current += scores[identifier]
        elif predictions.get(identifier):
            current -= 1
        if current > best:
            best, threshold = current, null_odds[identifier]
    return 100.0 * best / len(scores), threshold
