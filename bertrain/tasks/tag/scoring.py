"""Precision, recall and F1 of entities, as seqeval's default mode computes them, and the accuracy of words.

An entity is correct if its type, its first word and its last word are. A ratio of 0 to 0 is 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from bertrain.base.formatting import BASELINE
from bertrain.run.records import ClassScores
from bertrain.tasks.tag.schemes import Scheme, Tags


@dataclass(frozen=True)
class Counts:
    """Of one type, or of several together."""

    correct: int
    predicted: int
    true: int

    @property
    def precision(self) -> float:
        return self.correct / self.predicted if self.predicted else 0.0

    @property
    def recall(self) -> float:
        return self.correct / self.true if self.true else 0.0

    @property
    def f1(self) -> float:
        total = self.precision + self.recall
        return 2 * self.precision * self.recall / total if total else 0.0


def count_by_type(true: Sequence[Tags], predicted: Sequence[Tags], scheme: Scheme) -> dict[str, Counts]:
    """The counts of each type, sorted. In a scheme without entities, each word counts, and its tag is its type."""
    correct, num_predicted, num_true = Counter[str](), Counter[str](), Counter[str]()
    for tags, guesses in zip(true, predicted, strict=True):
        entities, found = set(scheme.entities(tags)), set(scheme.entities(guesses))
        num_true.update(entity.type for entity in entities)
        num_predicted.update(entity.type for entity in found)
        correct.update(entity.type for entity in entities & found)
    types = sorted(num_true.keys() | num_predicted.keys())
    return {name: Counts(correct[name], num_predicted[name], num_true[name]) for name in types}


def score_tags(true: Sequence[Tags], predicted: Sequence[Tags], scheme: Scheme) -> dict[str, float]:
    """F1, precision and recall of entities, accuracy of words, and the baselines: no entity, the same tag always.

    In a scheme without entities: the accuracy, its baseline, and the mean F1 of the tags.
    """
    words = Counter(tag for tags in true for tag in tags)
    pairs = (pair for tags, guesses in zip(true, predicted, strict=True) for pair in zip(tags, guesses, strict=True))
    accuracy = {
        "accuracy": sum(tag == guess for tag, guess in pairs) / words.total(),
        f"{BASELINE}accuracy": max(words.values()) / words.total(),
    }
    counts = count_by_type(true, predicted, scheme)
    if scheme.name == "words":
        return accuracy | {"f1_macro": sum(one.f1 for one in counts.values()) / len(counts)}
    whole = _total(counts)
    return {"f1": whole.f1, "precision": whole.precision, "recall": whole.recall, f"{BASELINE}f1": 0.0} | accuracy


def _total(counts: dict[str, Counts]) -> Counts:
    values = counts.values()
    return Counts(
        sum(one.correct for one in values), sum(one.predicted for one in values), sum(one.true for one in values)
    )


def scores_by_type(true: Sequence[Tags], predicted: Sequence[Tags], scheme: Scheme) -> tuple[ClassScores, ...]:
    counts = count_by_type(true, predicted, scheme)
    return tuple(ClassScores(name, one.precision, one.recall, one.f1, one.true) for name, one in counts.items())


def report_by_type(true: Sequence[Tags], predicted: Sequence[Tags], scheme: Scheme) -> str:
    """Precision, recall, F1 and number of each type as a table, the whole in the last row."""
    counts = count_by_type(true, predicted, scheme)
    rows = counts | ({} if scheme.name == "words" else {"all entities": _total(counts)})
    width = max(map(len, rows), default=0)
    lines = [f"{'':<{width}}  precision  recall     f1  number"]
    lines += [
        f"{name:<{width}}  {one.precision:>9.3f}  {one.recall:>6.3f}  {one.f1:>5.3f}  {one.true:>6,}"
        for name, one in rows.items()
    ]
    return "\n".join(lines)
