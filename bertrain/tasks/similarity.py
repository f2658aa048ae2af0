"""The task `similarity`: trains embeddings on pairs of texts with scores, on pairs, or on triplets.

    scored pairs   sentence1, sentence2, score      the cosine is to equal the score
    pairs          anchor, positive                 the positive is to be nearer than all others of the step
    triplets       anchor, positive, negative       the same; the negatives are candidates, too

Each text is a row of the Block, and the rows of an example follow each other (`Block.texts_per_example`): texts are
embedded one by one, in any bin, and only the loss sees which belong together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from bertrain.base.errors import UserError
from bertrain.base.files import write_json_lines
from bertrain.base.formatting import counted
from bertrain.config.settings import Settings
from bertrain.data.formats.block import Block
from bertrain.data.text.records import Problem
from bertrain.data.text.vocabulary import Vocabulary
from bertrain.tasks.classify import count_held_out, find_files
from bertrain.tasks.encode import encode_texts
from bertrain.tasks.metrics import compute_metrics
from bertrain.tasks.table_task import find_column, parse_number
from bertrain.tasks.tables import BadRows, Row, read_table
from bertrain.tasks.task import Head, TaskOutputs

FIRST = ("anchor", "sentence1", "query", "question")
SECOND = ("positive", "sentence2", "answer", "passage")
NEGATIVE, SCORE, IDS = ("negative",), ("score", "label", "similarity"), ("id", "idx", "index")
ROWS_AT_ONCE = 1024  # anchors compared with all candidates together
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class SimilaritySplit:
    name: str
    block: Block
    is_scored: bool
    ids: list[str]
    candidates: npt.NDArray[np.int64]
    """For each positive and negative, the number of its text: equal texts have the same."""
    recall_ranks: tuple[int, ...]

    @property
    def num_examples(self) -> int:
        return len(self.block) // self.block.texts_per_example

    @property
    def main_metric(self) -> str:
        return "spearmanr" if self.is_scored else "mrr"

    def metrics(self, outputs: TaskOutputs) -> dict[str, float]:
        vectors = self._normalized(outputs)
        if not self.is_scored:
            return rank_metrics(vectors[:, 0], vectors[:, 1:], self.candidates, self.recall_ranks)
        assert self.block.answers is not None
        scores = self.block.answers[:: self.block.texts_per_example, 0]
        return compute_metrics(("spearmanr", "pearson"), scores, self._cosines(vectors))

    def write_predictions(self, outputs: TaskOutputs, folder: Path) -> list[Path]:
        """Write the cosine of each pair, a JSON object per line."""
        cosines = self._cosines(self._normalized(outputs)).tolist()
        path, rows = folder / f"{self.name}.jsonl", zip(self.ids, cosines, strict=True)
        write_json_lines(path, ({"id": number, "similarity": round(cosine, 6)} for number, cosine in rows))
        return [path]

    def _normalized(self, outputs: TaskOutputs) -> Floats:
        """Vectors of length 1, [examples, texts, width]."""
        lengths = np.linalg.norm(outputs, axis=1, keepdims=True)
        return (outputs / np.maximum(lengths, 1e-12)).reshape(self.num_examples, -1, outputs.shape[1])

    @staticmethod
    def _cosines(vectors: Floats) -> Floats:
        return np.einsum("ne,ne->n", vectors[:, 0], vectors[:, 1])

    def take(self, name: str, examples: npt.NDArray[np.int64]) -> SimilaritySplit:
        texts = self.block.texts_per_example
        block = self.block.take((examples[:, None] * texts + np.arange(texts)).ravel())
        ids = [self.ids[example] for example in examples]
        return replace(self, name=name, block=block, ids=ids, candidates=self.candidates[examples])


def rank_metrics(
    anchors: Floats, others: Floats, numbers: npt.NDArray[np.int64], recall_ranks: Sequence[int]
) -> dict[str, float]:
    """Mean reciprocal rank of each anchor's positive among all candidates, and its recall at each of `recall_ranks`.

    `others` is [examples, positive and negatives, width]. Equal texts count as one candidate; other candidates that are
    as near as the positive rank before it, so that a model whose vectors are all equal finds nothing.
    """
    _, kept = np.unique(numbers.ravel(), return_index=True)
    candidates, their_numbers = others.reshape(-1, others.shape[-1])[kept], numbers.ravel()[kept]
    ranks = []
    for start in range(0, len(anchors), ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        near = anchors[rows] @ candidates.T
        is_positive = their_numbers[None, :] == numbers[rows, :1]
        of_positive = np.where(is_positive, near, -np.inf).max(1, keepdims=True)
        ranks.append(1 + ((near >= of_positive) & ~is_positive).sum(1))
    rank = np.concatenate(ranks)
    return {"mrr": float((1 / rank).mean())} | {f"recall_at_{k}": float((rank <= k).mean()) for k in recall_ranks}


class SimilarityTask:
    """Tables in a folder (train, dev, test), or a single file. All are read at once: their columns are their kind."""

    def __init__(self, settings: Settings, data: Path, vocabulary: Vocabulary, saved: Mapping[str, Any] | None) -> None:
        task = settings.task
        self.settings, self.vocabulary, self.data, self.name = settings, vocabulary, data, task.name
        self.head: Head = "embed"
        self.labels: tuple[str, ...] = ()
        self.notes: list[str] = []
        self.first = (task.text,) if task.text != "text" else FIRST
        self.second = (task.text_pair,) if task.text_pair else SECOND
        self.score = (task.label,) if task.label != "label" else SCORE
        self.files = find_files(data, self.notes, is_whole=saved is not None and not task.hold_out)
        self._load = cache(self._read)
        # STS-B's test part has no scores: its pairs are not examples of the same meaning.
        is_scored = "train" in self.files and self._load("train").is_scored
        others = [name for name in self.files if name != "train"]
        self.held_out_splits = [name for name in others if self._load(name).is_scored or not is_scored]
        self.hold_out = task.hold_out if "train" in self.files and not self.held_out_splits else 0.0
        if self.hold_out:
            missing = "dev part with scores" if others else "dev part"
            self.notes.append(f"{data} has no {missing}: {self.hold_out:.0%} of its rows are held out (task.hold_out)")
        elif not self.held_out_splits:
            what = "scores" if is_scored else "rows"
            self.notes.append(f"{data} has no held-out {what}, such as a dev.csv: there will be no evaluation")
        splits = [*self.held_out().values()] or [self._load(name) for name in self.files]
        self.main_metric = splits[0].main_metric

    @property
    def loss(self) -> Literal["cosine", "ranking"]:
        """The loss that `task.loss` stands for."""
        asked, is_scored = self.settings.task.loss, self._load("train").is_scored
        if asked == "cosine" and not is_scored:
            columns = " or ".join(map(repr, self.score))
            raise UserError("missing-scores", f"task.loss cosine needs scores; {self.data} has no column {columns}")
        return ("cosine" if is_scored else "ranking") if asked == "auto" else asked

    def training(self) -> SimilaritySplit:
        if "train" not in self.files:
            raise UserError("missing-split", f"--data {self.data} has no train file, such as train.csv")
        whole = self._load("train")
        return whole.take("train", np.setdiff1d(np.arange(whole.num_examples), self._held_out_rows(whole)))

    def held_out(self) -> Mapping[str, SimilaritySplit]:
        if self.hold_out:
            whole = self._load("train")
            return {"dev": whole.take("dev", self._held_out_rows(whole))}
        return {name: self._load(name) for name in self.held_out_splits}

    def to_predict(self) -> Mapping[str, SimilaritySplit]:
        known = self.held_out()
        rest = {name: self._load(name) for name in self.files if name != "train" and name not in known}
        return rest or known

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "head": self.head, "labels": []}

    def _held_out_rows(self, whole: SimilaritySplit) -> npt.NDArray[np.int64]:
        """Evenly strided examples; they depend on the rows alone."""
        count = count_held_out(whole.num_examples, self.hold_out, self.data) if self.hold_out else 0
        return (2 * np.arange(count) + 1) * whole.num_examples // (2 * max(1, count))

    def _select(self, names: list[str]) -> list[str | None]:
        hint = "; name yours with --task.text, --task.text_pair and --task.label"
        negative = find_column(names, NEGATIVE, required=False)
        score = find_column(names, self.score, hint, required=self.score != SCORE)
        if negative and score and self.score is SCORE:
            both = f"{self.data} has negatives and scores, in {negative!r} and {score!r}"
            raise UserError("mixed-columns", f"{both}: it is either triplets or scored pairs; leave out one column")
        return [
            find_column(names, self.first, hint), find_column(names, self.second, hint),
            negative if score is None else None, score, find_column(names, IDS, required=False),
        ]  # fmt: skip

    def _read(self, name: str) -> SimilaritySplit:
        files, bad_rows = self.files[name], BadRows(self.settings.task.on_error)
        texts: list[str] = []
        scores: list[float] = []
        ids: list[str] = []
        kinds: set[tuple[bool, bool]] = set()

        def select(names: list[str]) -> Sequence[str | None]:
            chosen = self._select(names)
            kinds.add((chosen[2] is not None, chosen[3] is not None))
            if len(kinds) > 1:
                raise UserError("mixed-columns", f"the files of {name} in {self.data} have different columns")
            return chosen

        for number, row in enumerate(chain.from_iterable(read_table(path, select) for path in files)):
            if isinstance(row, Problem):
                bad_rows.add(row)
                continue
            ((has_negative, is_scored),) = kinds
            try:
                of_row, score = self._parse(row, has_negative, is_scored)
            except ValueError as error:
                bad_rows.add(Problem(row.place, str(error)))
                continue
            texts += of_row
            scores.append(score)
            ids.append(row.values[4] or str(number))
        if not ids:
            raise bad_rows.nothing_usable(files)
        return self._encode(name, texts, scores if is_scored else None, ids, bad_rows)

    def _parse(self, row: Row, has_negative: bool, is_scored: bool) -> tuple[list[str], float]:
        """The texts and the score of a row, 0 without one; raises ValueError with the reason."""
        values = row.values[: 3 if has_negative else 2]
        texts = [value for value in values if value and value.strip()]
        if len(texts) < len(values):
            raise ValueError("has an empty text")
        if not is_scored:
            return texts, 0.0
        most, score = self.settings.task.max_score, parse_number((row.values[3] or "").strip())
        if not 0 <= score <= most:
            raise ValueError(
                f"has the score {score:g}, not 0 to {most:g}; --task.max_score sets the score of equal texts"
            )
        return texts, score / most

    def _encode(
        self, name: str, texts: list[str], scores: list[float] | None, ids: list[str], bad_rows: BadRows
    ) -> SimilaritySplit:
        size, longest = len(texts) // len(ids), self.settings.data.max_seq_length
        block, num_truncated = encode_texts(self.vocabulary, texts, None, longest)
        answers = np.repeat(np.array(scores or [0.0] * len(ids), dtype=np.float32), size)[:, None]
        kind = "scored pairs" if scores else "pairs" if size == 2 else "triplets"
        self.notes.append(f"{name}: {len(ids):,} {kind}")
        if bad_rows.count:
            self.notes.append(f"{name}: skipped {counted(bad_rows.count, 'row')}; the first: {bad_rows.first}")
        if num_truncated:
            limit = f"{longest} tokens (--data.max_seq_length)"
            self.notes.append(f"{name}: truncated {counted(num_truncated, 'text')} of {len(texts):,} to {limit}")
        numbers = {text: number for number, text in enumerate(dict.fromkeys(texts))}
        candidates = np.array([numbers[text] for text in texts]).reshape(-1, size)[:, 1:]
        block = replace(block, answers=answers, texts_per_example=size)
        return SimilaritySplit(name, block, scores is not None, ids, candidates, self.settings.task.recall_ranks)
