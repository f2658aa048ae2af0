"""A plain twin of SQuAD's windows and answers, one question and one token at a time.

Nothing here is shared with bertrain.tasks. It follows the algorithm that google-research/bert publishes in
run_squad.py, written anew, with characters in place of its words.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass
class PlainWindow:
    tokens: list[int]
    segment_b: int
    answer: tuple[int, int]
    characters: dict[int, tuple[int, int]]  # position in the window -> begin and end of its token in the context
    first: int  # token of the context that it begins with
    count: int


def plain_windows(
    query: list[int],
    context: list[int],
    characters: list[tuple[int, int]],
    answer: tuple[int, int] | None,
    *,
    cls: int,
    sep: int,
    max_seq_length: int,
    doc_stride: int,
    max_query_length: int,
) -> list[PlainWindow]:
    """Windows of one question; `answer` is the begin and end, in characters, of its answer."""
    query = query[:max_query_length]
    room = max_seq_length - len(query) - 3
    windows = []
    first = 0
    while True:
        count = min(room, len(context) - first)
        tokens = [cls, *query, sep, *context[first : first + count], sep]
        begin = len(query) + 2
        shown = {begin + i: characters[first + i] for i in range(count)}
        inside = (0, 0)
        if answer is not None:
            touched = [i for i, (a, b) in enumerate(characters) if a < answer[1] and b > answer[0]]
            if touched[0] >= first and touched[-1] < first + count:
                inside = (touched[0] - first + begin, touched[-1] - first + begin)
        windows.append(PlainWindow(tokens, begin, inside, shown, first, count))
        if first + count == len(context):
            return windows
        first += max(1, min(doc_stride, max_seq_length // 2, math.ceil(0.75 * room)))


def _is_richest(windows: list[PlainWindow], which: int, token: int) -> bool:
    best, best_score = -1, -math.inf
    for number, window in enumerate(windows):
        if not window.first <= token < window.first + window.count:
            continue
        left, right = token - window.first, window.first + window.count - 1 - token
        score = min(left, right) + 0.01 * window.count
        if score > best_score:
            best, best_score = number, score
    return best == which


def plain_answers(
    windows: list[PlainWindow],
    scores: list[list[tuple[float, float]]],
    context: str,
    *,
    n_best: int,
    max_answer_length: int,
    with_null: bool,
) -> tuple[list[dict[str, Any]], float | None]:
    """The n-best list of one question and, with `with_null`, by how much no answer beats the best one."""
    found: list[tuple[str, float, float]] = []
    null: tuple[str, float, float] | None = None
    for which, (window, values) in enumerate(zip(windows, scores, strict=True)):
        starts = sorted(range(len(values)), key=lambda i: -values[i][0])[:n_best]
        ends = sorted(range(len(values)), key=lambda i: -values[i][1])[:n_best]
        if with_null and (null is None or sum(values[0]) < null[1] + null[2]):
            null = ("", *values[0])
        for start in starts:
            for end in ends:
                if start not in window.characters or end not in window.characters:
                    continue
                if end < start or end - start + 1 > max_answer_length:
                    continue
                if not _is_richest(windows, which, window.first + start - window.segment_b):
                    continue
                text = context[window.characters[start][0] : window.characters[end][1]]
                found.append((text, values[start][0], values[end][1]))
    if null:
        found.append(null)
    found.sort(key=lambda one: -(one[1] + one[2]))
    chosen: dict[str, tuple[str, float, float]] = {}
    for one in found:
        if len(chosen) == n_best:
            break
        chosen.setdefault(one[0], one)
    if null:
        chosen.setdefault("", null)
    kept = list(chosen.values()) or [("", 0.0, 0.0)]
    total = sum(math.exp(one[1] + one[2]) for one in kept)
    listed = [
        {"text": one[0], "probability": math.exp(one[1] + one[2]) / total, "start_logit": one[1], "end_logit": one[2]}
        for one in kept
    ]
    best = next((one[1] + one[2] for one in kept if one[0]), 0.0)
    return listed, (null[1] + null[2] - best if null else None)
