"""The section `task` of a run's settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bertrain.base.errors import UserError
from bertrain.config.fields import changeable, setting


@dataclass(frozen=True, kw_only=True)
class TaskSettings:
    """The task of fine-tuning. Its files lie in the folder --data."""

    name: str = setting(
        "", "the task, such as glue/mnli, squad/v2.0, xnli, classify, tag or similarity; empty: pre-training"
    )
    on_error: Literal["stop", "skip"] = setting(
        "stop",
        "what to do with a damaged row. stop: refuse the file and name the line; skip: leave out and count the row",
    )
    text: str = setting(
        "text",
        "column of the text (tag: or of its words; similarity: of the first text, unless it is named anchor or "
        "sentence1)",
        tasks=("classify", "tag", "similarity"),
    )
    text_pair: str = setting("", "column of a second text; empty: none", tasks=("classify", "similarity"))
    label: str = setting(
        "label",
        "column of the label (tag: of the tags or spans; similarity: of the scores); for several labels per text, also "
        "several 0/1 columns, such as a,b,c",
        tasks=("classify", "tag", "similarity"),
        is_list=True,
    )
    target: Literal["class", "classes", "number"] = setting(
        "class",
        "what each text has. class: one label; classes: any number of labels; number: a number (regression)",
        tasks=("classify",),
    )
    class_weights: str = setting(
        "",
        "weights of the labels in the loss. balanced: in inverse proportion to their rows, so that rare labels count "
        "more; or a weight by label, such as spam=2,other=0.5; empty: all 1",
        tasks=("classify", "glue", "xnli"),
        is_list=True,
    )
    loss: Literal["auto", "cosine", "ranking"] = setting(
        "auto",
        "the loss. cosine: squared error of the cosine against the score; ranking: cross-entropy of finding the "
        "positive among all texts of the step; auto: cosine if the training data has scores",
        tasks=("similarity",),
    )
    temperature: float = setting(
        0.05,
        "with task.loss ranking: divides the cosines before the softmax over the texts of a step",
        min=0.001,
        max=100,
        tasks=("similarity",),
    )
    max_score: float = setting(
        1.0, "the score of equal texts; scores are divided by it", min=1e-6, tasks=("similarity",)
    )
    hold_out: float = changeable(
        0.0,
        "classify, tag, similarity: share of rows to hold out for evaluation if there is no dev file",
        min=0,
        max=0.9,
    )
    recall_at: str = changeable(
        "1,10",
        "without scores: each K of recall_at_K, the share of positives among the K nearest texts",
        tasks=("similarity",),
        is_list=True,
    )
    languages: str = changeable(
        "all", "languages to score, such as de,fr; all: every language of the file", tasks=("xnli",), is_list=True
    )
    doc_stride: int = setting(
        128,
        "tokens between the starts of two windows of a long text; at most half of data.max_seq_length",
        min=1,
        tasks=("squad", "tag"),
    )
    text_split: Literal["auto", "punctuation", "spaces"] = setting(
        "auto",
        "how a text is split into words. spaces: at spaces, and punctuation around a word is split off (Ada-Lou is one "
        "word); punctuation: also at every punctuation mark; auto: spaces if the training data has lists of words, "
        "punctuation if it has texts",
        tasks=("tag",),
    )
    max_query_length: int = setting(64, "longest question in tokens; the rest is cut off", min=1, tasks=("squad",))
    max_answer_length: int = changeable(30, "longest answer to predict, in tokens", min=1, tasks=("squad",))
    n_best: int = changeable(20, "candidate answers to keep for each question", min=1, tasks=("squad",))
    null_threshold: float = changeable(
        0.0,
        "predict no answer if its score exceeds that of the best answer by more than this",
        tasks=("squad/v2.0",),
    )

    def __post_init__(self) -> None:
        if not all(word.strip().isdecimal() and int(word) for word in self.recall_at.split(",")):
            raise UserError("invalid-value", f"task.recall_at is {self.recall_at!r}; give whole numbers such as 1,5,10")

    @property
    def recall_ranks(self) -> tuple[int, ...]:
        return tuple(sorted({int(word) for word in self.recall_at.split(",")}))
