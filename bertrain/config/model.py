"""The section `model` of a run's settings, and the defaults of model families."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from bertrain.base.errors import UserError
from bertrain.config.choices import MODERN_MASK_PROBABILITY, Family, Pooling
from bertrain.config.fields import setting


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The network. The defaults are BERT-Base, uncased. `family = "modern"` has others: max_positions 8192, no
    dropout, layer_norm_eps 1e-5, no nsp, data.mask_probability 0.3."""

    family: Family = setting(
        "bert",
        "architecture. bert: Devlin et al., 2018; modern: ModernBERT, with rotary positions, gated layers and local "
        "attention, trained on masked words only",
    )
    config: str = setting("", "path of a bert_config.json that describes the model; other model settings override it")
    vocab_size: int = setting(30522, "words in the vocabulary; 0: as many as the data has", min=6, or_zero=True)
    hidden_size: int = setting(768, "width of the encoder", min=1)
    num_layers: int = setting(12, "encoder layers", min=1)
    num_heads: int = setting(12, "attention heads; must divide hidden_size", min=1)
    intermediate_size: int = setting(3072, "width of the feed-forward layer", min=1)
    max_positions: int = setting(512, "longest sequence in tokens; bert: number of position embeddings", min=3)
    num_segments: int = setting(
        2,
        "bert: number of segment (token type) embeddings; 1: RoBERTa, which has no next-sentence prediction",
        min=1,
        family="bert",
    )
    global_every: int = setting(
        3, "modern: every Nth layer, starting with the first, attends to all tokens", min=1, family="modern"
    )
    local_window: int = setting(
        128, "modern: tokens that the other layers attend to, half on each side", min=2, family="modern"
    )
    global_theta: float = setting(
        160000.0, "modern: base of the rotary angles in layers that attend to all tokens", min=1, family="modern"
    )
    local_theta: float = setting(
        10000.0, "modern: base of the rotary angles in layers with a window", min=1, family="modern"
    )
    hidden_dropout: float = setting(0.1, "dropout after embeddings and each dense layer", min=0, max=0.99)
    attention_dropout: float = setting(0.1, "dropout on attention probabilities", min=0, max=0.99)
    initializer_range: float = setting(0.02, "standard deviation of the truncated normal for weights", min=0)
    initial_heads: Literal["random", "neighbours"] = setting(
        "random",
        "initialization of a new model's attention. random: as in BERT; neighbours: heads of the first layer start by "
        "attending to adjacent words, which saves millions of tokens at the start (bert only)",
        family="bert",
    )
    initial_bias: Literal["zero", "frequencies"] = setting(
        "zero",
        "bias of the masked-word output of a new model. zero: as in BERT; frequencies: the logarithm of each word's "
        "share of the training data, so that training need not learn word frequencies first; on CPUs, deep models then "
        "leave the first plateau of the loss sooner",
    )
    layer_norm_eps: float = setting(1e-12, "epsilon inside LayerNorm", min=0)
    nsp: bool = setting(True, "also train next-sentence prediction, not only masked words (bert only)", family="bert")
    rtd: float = setting(
        0.0,
        "weight of the loss of replaced-token detection (ELECTRA): the model also predicts for each token whether "
        "data.generator, a smaller BERT, has replaced it. 0: not trained; 50: as in ELECTRA (bert only)",
        min=0,
        family="bert",
    )
    head: Literal["pretrain", "classify", "multilabel", "regress", "span", "tag", "embed"] = setting(
        "pretrain",
        "output layer. pretrain: masked words and next sentence; classify: a class for each text; multilabel: any "
        "number of labels for each text; regress: a number for each text; span: start and end of an answer in the "
        "text; tag: a class for each word; embed: a vector for each text. Fine-tuning sets it from the task",
    )
    num_labels: int = setting(2, "classify, multilabel, tag: number of classes", min=2)
    pooling: Pooling = setting(
        "mean",
        "embed (modern: also classify, multilabel, regress): how the token vectors of a text become one. mean, max: "
        "over all tokens; cls: the vector of [CLS]",
    )
    head_dropout: float = setting(
        0.1, "classify, multilabel, regress, tag: dropout before the last layer", min=0, max=0.99
    )
    pad_vocab_to: Literal[1, 8, 64] = setting(
        1, "round the rows of the word embeddings up to a multiple of this (8 or 64 suits tensor cores); adds no word"
    )

    @property
    def padded_vocab_size(self) -> int:
        return -(-self.vocab_size // self.pad_vocab_to) * self.pad_vocab_to

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def windows(self) -> tuple[int | None, ...]:
        """For each layer, how many positions away a token may attend; None: all of its sequence."""
        is_local = [self.family == "modern" and number % self.global_every > 0 for number in range(self.num_layers)]
        return tuple(self.local_window // 2 if local else None for local in is_local)

    @property
    def is_roberta(self) -> bool:
        """Whether weights are read and written as RoBERTa's (config/roberta.py)."""
        return self.family == "bert" and self.num_segments == 1

    def check(self) -> ModelSettings:
        """Refuse a model that cannot be built; returns itself."""
        heads, width = self.num_heads, self.hidden_size
        if width % heads:
            wrong = f"model.num_heads {heads} does not divide model.hidden_size {width}"
            raise UserError("indivisible-heads", f"{wrong}; change one of them")
        if self.family == "modern" and self.head_size % 2:
            odd = f"model.family modern needs heads of an even size, not {self.head_size}"
            raise UserError("indivisible-heads", f"{odd}; change model.num_heads {heads} or model.hidden_size {width}")
        if self.is_roberta and self.nsp and self.head == "pretrain":
            raise UserError(
                "other-family", "model.num_segments 1 is RoBERTa, which has no pairs of segments; set --model.nsp false"
            )
        usual = FAMILY_DEFAULTS[self.family]
        for item in fields(self):
            owner, value = item.metadata["family"], getattr(self, item.name)
            if owner not in ("", self.family) and value != usual.get(f"model.{item.name}", item.default):
                named = f"model.{item.name} {str(value).lower()}"
                raise UserError("other-family", f"{named} is for model.family {owner}, not {self.family}; leave it out")
        if self.family == "modern" and self.pooling == "max" and self.head in ("classify", "multilabel", "regress"):
            raise UserError(
                "other-family", "model.family modern has no classifier with model.pooling max; use mean or cls"
            )
        return self


FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    "bert": {},
    "modern": {
        "model.max_positions": 8192,
        "model.hidden_dropout": 0.0,
        "model.attention_dropout": 0.0,
        "model.head_dropout": 0.0,
        "model.layer_norm_eps": 1e-5,
        "model.nsp": False,
        "data.mask_probability": MODERN_MASK_PROBABILITY,
    },
}
"""Defaults of a model family where they are not those of the fields."""
