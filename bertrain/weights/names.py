"""What others call our tensors: one table for TensorFlow's, Hugging Face's and NVIDIA's checkpoints.

All of them descend from google-research/bert, so one row has a tensor's name here, in TensorFlow and in PyTorch.
Variants of PyTorch's names (older versions, fused layers, wrappers) are spelled back into the usual ones by `spell`.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from torch import Tensor


class Place(NamedTuple):
    """Where a tensor's values lie in our model."""

    ours: str
    third: int
    """0, 1, 2 for query, key and value, which are one tensor here; -1 for all of it."""

    def within(self, tensor: Tensor) -> Tensor:
        """These values of the whole tensor `ours`."""
        return tensor if self.third < 0 else tensor.chunk(3)[self.third]


# ours, third, TensorFlow's, PyTorch's; {} is the layer's number.
DENSE = (
    ("layers.{}.qkv", 0, "bert/encoder/layer_{}/attention/self/query", "bert.encoder.layer.{}.attention.self.query"),
    ("layers.{}.qkv", 1, "bert/encoder/layer_{}/attention/self/key", "bert.encoder.layer.{}.attention.self.key"),
    ("layers.{}.qkv", 2, "bert/encoder/layer_{}/attention/self/value", "bert.encoder.layer.{}.attention.self.value"),
    (
        "layers.{}.attention_out",
        -1,
        "bert/encoder/layer_{}/attention/output/dense",
        "bert.encoder.layer.{}.attention.output.dense",
    ),
    ("layers.{}.expand", -1, "bert/encoder/layer_{}/intermediate/dense", "bert.encoder.layer.{}.intermediate.dense"),
    ("layers.{}.contract", -1, "bert/encoder/layer_{}/output/dense", "bert.encoder.layer.{}.output.dense"),
    ("masked_words.transform", -1, "cls/predictions/transform/dense", "cls.predictions.transform.dense"),
    ("next_sentence.pool", -1, "bert/pooler/dense", "bert.pooler.dense"),
)
NORMS = (
    ("embeddings.norm", "bert/embeddings/LayerNorm", "bert.embeddings.LayerNorm"),
    (
        "layers.{}.attention_norm",
        "bert/encoder/layer_{}/attention/output/LayerNorm",
        "bert.encoder.layer.{}.attention.output.LayerNorm",
    ),
    ("layers.{}.output_norm", "bert/encoder/layer_{}/output/LayerNorm", "bert.encoder.layer.{}.output.LayerNorm"),
    ("masked_words.norm", "cls/predictions/transform/LayerNorm", "cls.predictions.transform.LayerNorm"),
)
SINGLE = (
    ("embeddings.words.weight", "bert/embeddings/word_embeddings", "bert.embeddings.word_embeddings.weight"),
    (
        "embeddings.positions.weight",
        "bert/embeddings/position_embeddings",
        "bert.embeddings.position_embeddings.weight",
    ),
    (
        "embeddings.segments.weight",
        "bert/embeddings/token_type_embeddings",
        "bert.embeddings.token_type_embeddings.weight",
    ),
    ("masked_words.bias", "cls/predictions/output_bias", "cls.predictions.bias"),
    ("next_sentence.classify.weight", "cls/seq_relationship/output_weights", "cls.seq_relationship.weight"),
    ("next_sentence.classify.bias", "cls/seq_relationship/output_bias", "cls.seq_relationship.bias"),
    ("answer.classify.weight", "output_weights", "classifier.weight"),
    ("answer.classify.bias", "output_bias", "classifier.bias"),
    ("answer.score.weight", "cls/squad/output_weights", "qa_outputs.weight"),
    ("answer.score.bias", "cls/squad/output_bias", "qa_outputs.bias"),
)
POOL, POOL_OF_ANSWERS = "next_sentence.pool.", "answer.pool."
"""The pooler, which others count to the encoder, is the first layer of the head that reads it."""
# Tensors that some programs write twice, or under a second name. Equal copies are passed over.
COPIES = (
    ("embeddings.words.weight", "cls.predictions.decoder.weight"),
    ("masked_words.bias", "cls.predictions.decoder.bias"),
    ("layers.{}.qkv.weight", "bert.encoder.layer.{}.attention.self.Wqkv"),
    ("layers.{}.qkv.bias", "bert.encoder.layer.{}.attention.self.Bqkv"),
)
BUFFERS = ("bert.embeddings.position_ids", "bert.embeddings.token_type_ids")
"""Stored by some versions beside the weights; they are constants."""

PREFIXES = ("module.", "bert_model_segment.", "heads_only_segment.")
"""Of torch's data-parallel wrapper, and of NVIDIA's model in two segments."""
SPELLINGS = (
    (r"LayerNorm\.gamma$", "LayerNorm.weight"),
    (r"LayerNorm\.beta$", "LayerNorm.bias"),
    (r"\bdense_act\b", "dense"),
    (r"attention\.multi_head_attention\.q_", "attention.self.query."),
    (r"attention\.multi_head_attention\.k_", "attention.self.key."),
    (r"attention\.multi_head_attention\.v_", "attention.self.value."),
    (r"attention\.multi_head_attention\.out_proj_", "attention.output.dense."),
    (r"attention\.layer_norm\.", "attention.output.LayerNorm."),
    (r"attention\.self\.Wq$", "attention.self.query.weight"),
    (r"attention\.self\.Wk$", "attention.self.key.weight"),
    (r"attention\.self\.Wv$", "attention.self.value.weight"),
    (r"attention\.self\.Bq$", "attention.self.query.bias"),
    (r"attention\.self\.Bk$", "attention.self.key.bias"),
    (r"attention\.self\.Bv$", "attention.self.value.bias"),
    (r"intermediate\.dense\.(weight|bias)1$", r"intermediate.dense.\1"),
    (r"intermediate\.dense\.(weight|bias)2$", r"output.dense.\1"),
)
"""Older and fused names -> the usual ones: TensorFlow's of LayerNorm, and NVIDIA's of dense layers and attention."""


def _tensorflow_table() -> dict[str, Place]:
    table = {theirs: Place(ours, -1) for ours, theirs, _ in SINGLE}
    for ours, third, theirs, _ in DENSE:
        table[f"{theirs}/kernel"] = Place(f"{ours}.weight", third)
        table[f"{theirs}/bias"] = Place(f"{ours}.bias", third)
    for ours, theirs, _ in NORMS:
        table |= {f"{theirs}/gamma": Place(f"{ours}.weight", -1), f"{theirs}/beta": Place(f"{ours}.bias", -1)}
    return table


def _torch_table() -> dict[str, Place]:
    table = {theirs: Place(ours, -1) for ours, _, theirs in SINGLE}
    for kind in ("weight", "bias"):
        table |= {f"{theirs}.{kind}": Place(f"{ours}.{kind}", third) for ours, third, _, theirs in DENSE}
        table |= {f"{theirs}.{kind}": Place(f"{ours}.{kind}", -1) for ours, _, theirs in NORMS}
    return table


TENSORFLOW = _tensorflow_table()
TRANSPOSED_IN_TENSORFLOW = "/kernel"
"""How names end whose matrices lie there with a column for each output."""
TORCH = _torch_table()
TORCH_AND_COPIES = TORCH | {theirs: Place(ours, -1) for ours, theirs in COPIES}


def place_in(table: dict[str, Place], name: str) -> Place | None:
    """Where the tensor that others call `name` lies in our model, or None."""
    number = re.search(r"(?<=[._]layer[._])\d+", name.replace("/", "."))
    if number is None:
        return table.get(name)
    place = table.get(name[: number.start()] + "{}" + name[number.end() :])
    return place and place._replace(ours=place.ours.format(int(number[0])))


def spell(names: list[str]) -> dict[str, str]:
    """PyTorch's names as they are in a file -> as they are in the table."""
    spelled = {}
    for name in names:
        usual = name
        while usual.startswith(PREFIXES):
            usual = usual.split(".", 1)[1]
        for pattern, replacement in SPELLINGS:
            usual = re.sub(pattern, replacement, usual)
        spelled[name] = usual
    if not any(usual.startswith("bert.") for usual in spelled.values()):  # saved without heads
        spelled = {name: usual if usual.startswith("cls.") else f"bert.{usual}" for name, usual in spelled.items()}
    return spelled


def for_head(place: Place, head: str) -> Place:
    """A place in a model with another head than pre-training's: its pooler is that head's."""
    if head != "pretrain" and place.ours.startswith(POOL):
        return place._replace(ours=POOL_OF_ANSWERS + place.ours.removeprefix(POOL))
    return place


def other_pool(name: str) -> str:
    """The name of a pooler's tensor in a model with the other kind of head; any other name as it is."""
    for one, other in ((POOL, POOL_OF_ANSWERS), (POOL_OF_ANSWERS, POOL)):
        if name.startswith(one):
            return other + name.removeprefix(one)
    return name


def absent_heads(*, nsp: bool = True, head: str = "pretrain") -> tuple[str, ...]:
    """How the names of tensors begin, here, that a model with this head does not have."""
    match head:
        case "pretrain":
            return ("answer.",) if nsp else ("answer.", "next_sentence.")
        case "span":
            return ("masked_words.", "next_sentence.", "answer.classify.", POOL_OF_ANSWERS)
        case _:
            return ("masked_words.", "next_sentence.", "answer.score.")


def huggingface_names(num_layers: int, *, nsp: bool = True, head: str = "pretrain") -> dict[str, Place]:
    """For each tensor of Hugging Face's BertForPreTraining (or, without `nsp`, BertForMaskedLM), where it lies here.

    With another `head`, those of BertForSequenceClassification or BertForQuestionAnswering.
    """
    absent, names = absent_heads(nsp=nsp, head=head), {}
    for theirs, found in TORCH.items():
        place = for_head(found, head)
        if place.ours.startswith(absent):
            continue
        for number in range(num_layers) if "{}" in theirs else (0,):
            names[theirs.format(number)] = place._replace(ours=place.ours.format(number))
    return names
