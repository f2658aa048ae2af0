"""Predict answers from the logits of each token: the best spans over all windows of a question.

A span starts only in the window that gives its first token the most context, as in Google's BERT, so that no answer
counts twice. In v2.0, [CLS] stands for no answer; the null odds are its score minus that of the best span.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bertrain.base.files import write_atomically
from bertrain.config.settings import TaskSettings
from bertrain.data.formats.block import flat_ranges
from bertrain.data.formats.masking import Ints
from bertrain.tasks.metrics import softmax
from bertrain.tasks.squad.files import Collection, Version
from bertrain.tasks.squad.windows import Windows
from bertrain.tasks.task import TaskOutputs

CHUNK_WINDOWS = 1024  # processed together: each takes n_best^2 spans, and as many tokens as the longest


class Candidate(NamedTuple):
    """A possible answer and the logits of its first and last token; an empty text stands for no answer."""

    text: str
    start: float
    end: float
    place: int = 0  # index of its first character in the context

    @property
    def score(self) -> float:
        return self.start + self.end


@dataclass(frozen=True)
class Answers:
    """The predicted answers to a question, the best first, and the null odds (v2.0)."""

    id: str
    candidates: list[Candidate]
    best: str  # the best text that is not empty
    null_odds: float | None

    def prediction(self, null_threshold: float) -> str:
        """The best text, or an empty one where the null odds exceed the threshold."""
        return "" if self.null_odds is not None and self.null_odds > null_threshold else self.best

    def to_dict(self, null_threshold: float) -> dict[str, Any]:
        """The prediction and, of each candidate, also its place; in v2.0, the null odds."""
        candidates = [
            ranked | {"start": one.place, "end": one.place + len(one.text)}
            for one, ranked in zip(self.candidates, _with_probabilities(self.candidates), strict=True)
        ]
        odds = {} if self.null_odds is None else {"null_odds": self.null_odds}
        return {"answer": self.prediction(null_threshold), "candidates": candidates} | odds


def find_answers(
    collection: Collection, windows: Windows, outputs: TaskOutputs, version: Version, settings: TaskSettings
) -> list[Answers]:
    chunks = (slice(first, first + CHUNK_WINDOWS) for first in range(0, len(windows.question), CHUNK_WINDOWS))
    parts = [_best_spans(windows, outputs, chunk, settings) for chunk in chunks]
    spans = _Spans(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))
    order = np.lexsort((-(spans.start + spans.end), windows.question[spans.window]))
    spans = _Spans(*(values[order] for values in spans))
    per_question = np.bincount(windows.question[spans.window], minlength=len(collection.questions))
    nulls = _null_candidates(windows, outputs) if version == "v2.0" else [None] * len(collection.questions)
    context = windows.context[spans.window]
    base = windows.paragraphs.offsets[context] + windows.first[spans.window] - windows.block.segment_b[spans.window]
    begins, ends = windows.paragraphs.begins[base + spans.first], windows.paragraphs.ends[base + spans.last]
    columns = context.tolist(), begins.tolist(), ends.tolist(), spans.start.tolist(), spans.end.tolist()

    def candidate(paragraph: int, begin: int, end: int, start_logit: float, end_logit: float) -> Candidate:
        return Candidate(collection.contexts[paragraph][begin:end], start_logit, end_logit, begin)

    stops = np.cumsum(per_question)
    own_spans = map(slice, (stops - per_question).tolist(), stops.tolist())
    return [
        rank_answers(question.id, map(candidate, *(column[own] for column in columns)), null, settings.n_best)
        for question, own, null in zip(collection.questions, own_spans, nulls, strict=True)
    ]


class _Spans(NamedTuple):
    window: Ints
    first: Ints  # index of its first token in the window
    last: Ints
    start: np.ndarray
    end: np.ndarray


def _best_spans(windows: Windows, outputs: TaskOutputs, chosen: slice, settings: TaskSettings) -> _Spans:
    """The valid spans between the `n_best` first and the `n_best` last tokens of each of some windows."""
    block = windows.block
    lengths, offsets = block.lengths[chosen], block.offsets[:-1][chosen]
    begins = block.segment_b[chosen].astype(np.int64)
    inside = np.arange(lengths.max(initial=1)) < lengths[:, None]
    scores = np.full((2, *inside.shape), -np.inf)
    most_context = np.zeros(inside.shape, bool)
    tokens = flat_ranges(offsets, lengths)
    scores[:, inside] = outputs[tokens].T
    most_context[inside] = windows.has_most_context[tokens]
    # Stable: of equal logits the earlier token comes first.
    best = np.argsort(-scores, axis=2, kind="stable")[:, :, : settings.n_best]
    first, last = best[0][:, :, None], best[1][:, None, :]
    ends = (begins + windows.counts[chosen])[:, None, None]
    is_valid = (
        np.take_along_axis(most_context, best[0], axis=1)[:, :, None]
        & (last >= first)
        & (last < first + settings.max_answer_length)
        & (last < ends)
    )
    window, row, column = np.nonzero(is_valid)
    first, last = best[0][window, row], best[1][window, column]
    return _Spans(chosen.start + window, first, last, scores[0][window, first], scores[1][window, last])


def _null_candidates(windows: Windows, outputs: TaskOutputs) -> list[Candidate | None]:
    """The [CLS] of each question in the window that scores it lowest."""
    at_cls = outputs[windows.block.offsets[:-1]].astype(np.float64)
    order = np.lexsort((at_cls.sum(axis=1), windows.question))
    (firsts,) = np.nonzero(np.diff(windows.question[order], prepend=-1))
    return [Candidate("", start, end) for start, end in at_cls[order[firsts]].tolist()]


def rank_answers(identifier: str, spans: Iterable[Candidate], null: Candidate | None, n_best: int) -> Answers:
    """The first `n_best` candidates of different text, with no answer ranked among them."""
    found: dict[str, Candidate] = {}
    best = None
    for candidate in spans:
        best = best or (candidate if candidate.text else None)  # it may not be among the first
        if null is not None and null.score > candidate.score:
            found.setdefault("", null)
        if len(found) < n_best:
            found.setdefault(candidate.text, candidate)
        elif best is not None:
            break
    if null is not None:
        found.setdefault("", null)
    odds = None if null is None else null.score - (best.score if best else 0.0)
    return Answers(identifier, list(found.values()) or [Candidate("", 0.0, 0.0)], best.text if best else "", odds)


def write_answers(answers: Sequence[Answers], folder: Path, *, null_threshold: float) -> list[Path]:
    """Write predictions.json, nbest_predictions.json and, in v2.0, null_odds.json in the official format."""
    contents: dict[str, dict[str, Any]] = {
        "predictions.json": {one.id: one.prediction(null_threshold) for one in answers},
        "nbest_predictions.json": {one.id: _with_probabilities(one.candidates) for one in answers},
    }
    if any(one.null_odds is not None for one in answers):
        contents["null_odds.json"] = {one.id: one.null_odds for one in answers}
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        write_atomically(folder / name, json.dumps(content, indent=4) + "\n")
    return [folder / name for name in contents]


def _with_probabilities(candidates: list[Candidate]) -> list[dict[str, Any]]:
    probabilities = softmax(np.array([candidate.score for candidate in candidates])).tolist()
    return [
        {"text": one.text, "probability": probability, "start_logit": one.start, "end_logit": one.end}
        for one, probability in zip(candidates, probabilities, strict=True)
    ]
