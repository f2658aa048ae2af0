"""The operations of the API by what a model can do, with their fields and an example of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from bertrain.base.schema import Count


@dataclass(frozen=True)
class Field:
    name: str
    schema: Any  # of base/schema.py
    help: str
    default: Any = None  # None: the field is required


@dataclass(frozen=True)
class Operation:
    """One POST of the API. Its first field holds the texts; `answer` is an example of the answer to one of them."""

    name: str
    summary: str
    fields: Sequence[Field]
    example: dict[str, Any]
    answer: Any
    meaning: str


TEXTS = Field("texts", list[str], "the texts")
PAIRS = Field("pairs", list[tuple[str, str]], "pairs of texts")
QUESTIONS = Field("questions", [{"question": str, "context": str}], "questions, each with the context of its answer")
QUERY = Field("query", str, "the text to compare with")
TOP = Field("top", Count, "how many, the best first", 5)
TRUNCATE = Field("truncate", bool, "cut texts that are too long for the model, instead of refusing them", False)

FILL_MASK = Operation(
    "fill-mask", "Predict the masked words of texts", (replace(TEXTS, help="texts with one [MASK] or more"), TOP),
    example={"texts": ["the capital of france is [MASK] ."], "top": 2},
    answer=[[{"word": "paris", "probability": 0.62}, {"word": "lyon", "probability": 0.08}]],
    meaning="for each [MASK] of a text, its likeliest words",
)  # fmt: skip
ENTITY = {"start": 0, "end": 3, "label": "person", "score": 0.98, "text": "Ada"}
TAG = Operation(
    "predict", "Find the entities of texts", (TEXTS,),
    example={"texts": ["Ada lives here."]},
    answer={"text": "Ada lives here.", "entities": [ENTITY]},
    meaning="the entities with their places, in characters",
)  # fmt: skip
BEST = {"text": "Ada", "probability": 0.9, "start_logit": 4.1, "end_logit": 3.8, "start": 18, "end": 21}
ANSWER = Operation(
    "answer", "Answer questions about texts", (QUESTIONS,),
    example={"questions": [{"question": "Who wrote it?", "context": "It was written by Ada."}]},
    answer={"answer": "Ada", "candidates": [BEST]},
    meaning="the answer, which is a part of the context or empty, and the likeliest candidates",
)  # fmt: skip
EMBED = Operation(
    "embed", "One vector for each text", (TEXTS, TRUNCATE),
    example={"texts": ["a text"]}, answer=[0.12, -0.03], meaning="the vector",
)  # fmt: skip
NEAREST = Operation(
    "nearest", "The texts that are nearest to a query", (TEXTS, QUERY, TOP, TRUNCATE),
    example={"query": "a text", "texts": ["another text", "yet another"]},
    answer={"index": 0, "text": "another text", "similarity": 0.71},
    meaning="a text, its place among the texts, and its cosine similarity",
)  # fmt: skip


def predict_operation(head: str, labels: Sequence[str], *, is_pair: bool) -> Operation:
    """That of a classifier with these labels, or of a regressor, of texts or of pairs."""
    shares = dict(zip(labels, (0.9, 0.1), strict=False))
    answers: dict[str, Any] = {
        "classify": {"label": "".join(labels[:1]), "probabilities": shares},
        "multilabel": {"labels": list(labels[:1]), "probabilities": shares},
        "regress": {"number": 0.7},
    }
    what = "the number" if head == "regress" else "the label, or labels, and the probability of every label"
    example = {"pairs": [["a text", "another text"]]} if is_pair else {"texts": ["a text"]}
    fields = (PAIRS if is_pair else TEXTS, TRUNCATE)
    return Operation("predict", "Predict the label or number of texts", fields, example, answers[head], what)
