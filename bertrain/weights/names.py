"""Map the tensor names of TensorFlow, Hugging Face and NVIDIA checkpoints to parameters of our model.

BERT's names descend from google-research/bert: one table has our name and PyTorch's, and TensorFlow's follows by rule.
`normalize_names` turns variants of PyTorch's names (older versions, fused layers, wrappers) into the usual ones.
ModernBERT's table has Transformers' names.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from torch import Tensor


class ParameterSlice(NamedTuple):
    """A parameter of our model, or a third of it."""

    parameter: str
    third: int = -1  # 0, 1, 2 for query, key and value, which are one parameter here; -1 for all of it

    def select(self, tensor: Tensor) -> Tensor:
        return tensor if self.third < 0 else tensor.chunk(3)[self.third]

    def with_suffix(self, kind: str) -> ParameterSlice:
        return self._replace(parameter=f"{self.parameter}.{kind}")


# Ours and PyTorch's, without .weight and .bias; {} is the index of the layer.
DENSE = (
    (ParameterSlice("layers.{}.qkv", 0), "bert.encoder.layer.{}.attention.self.query"),
    (ParameterSlice("layers.{}.qkv", 1), "bert.encoder.layer.{}.attention.self.key"),
    (ParameterSlice("layers.{}.qkv", 2), "bert.encoder.layer.{}.attention.self.value"),
    (ParameterSlice("layers.{}.attention_out"), "bert.encoder.layer.{}.attention.output.dense"),
    (ParameterSlice("layers.{}.expand"), "bert.encoder.layer.{}.intermediate.dense"),
    (ParameterSlice("layers.{}.contract"), "bert.encoder.layer.{}.output.dense"),
    (ParameterSlice("masked_words.transform"), "cls.predictions.transform.dense"),
    (ParameterSlice("next_sentence.pool"), "bert.pooler.dense"),
)
NORMS = (
    (ParameterSlice("embeddings.norm"), "bert.embeddings.LayerNorm"),
    (ParameterSlice("layers.{}.attention_norm"), "bert.encoder.layer.{}.attention.output.LayerNorm"),
    (ParameterSlice("layers.{}.output_norm"), "bert.encoder.layer.{}.output.LayerNorm"),
    (ParameterSlice("masked_words.norm"), "cls.predictions.transform.LayerNorm"),
)
# Ours, TensorFlow's and PyTorch's whole names.
SINGLE = (
    ("embeddings.words.weight", "bert/embeddings/word_embeddings", "bert.embeddings.word_embeddings.weight"),
    ("embeddings.positions.weight", "bert/embeddings/position_embeddings",
     "bert.embeddings.position_embeddings.weight"),
    ("embeddings.segments.weight", "bert/embeddings/token_type_embeddings",
     "bert.embeddings.token_type_embeddings.weight"),
    ("masked_words.bias", "cls/predictions/output_bias", "cls.predictions.bias"),
    ("next_sentence.classify.weight", "cls/seq_relationship/output_weights", "cls.seq_relationship.weight"),
    ("next_sentence.classify.bias", "cls/seq_relationship/output_bias", "cls.seq_relationship.bias"),
    ("answer.classify.weight", "output_weights", "classifier.weight"),
    ("answer.classify.bias", "output_bias", "classifier.bias"),
    ("answer.score.weight", "cls/squad/output_weights", "qa_outputs.weight"),
    ("answer.score.bias", "cls/squad/output_bias", "qa_outputs.bias"),
)  # fmt: skip
# ModernBERT: ours and Transformers' whole names. Biases it has none but these.
MODERN = (
    ("embeddings.words.weight", "model.embeddings.tok_embeddings.weight"),
    ("embeddings.norm.weight", "model.embeddings.norm.weight"),
    ("layers.{}.attention_norm.weight", "model.layers.{}.attn_norm.weight"),
    ("layers.{}.qkv.weight", "model.layers.{}.attn.Wqkv.weight"),
    ("layers.{}.attention_out.weight", "model.layers.{}.attn.Wo.weight"),
    ("layers.{}.expand_norm.weight", "model.layers.{}.mlp_norm.weight"),
    ("layers.{}.expand.weight", "model.layers.{}.mlp.Wi.weight"),
    ("layers.{}.contract.weight", "model.layers.{}.mlp.Wo.weight"),
    ("final_norm.weight", "model.final_norm.weight"),
    ("masked_words.transform.weight", "head.dense.weight"),
    ("masked_words.norm.weight", "head.norm.weight"),
    ("masked_words.bias", "decoder.bias"),
    ("answer.classify.weight", "classifier.weight"),
    ("answer.classify.bias", "classifier.bias"),
)
MODERN_HEADS = ("head.", "decoder.", "classifier.")
# The pooler, elsewhere part of the encoder, is here the first layer of the head that reads it.
SHARED_BY_HEADS = {
    "bert": (("next_sentence.pool.", "answer.pool."),),
    "modern": (("masked_words.transform.", "answer.transform."), ("masked_words.norm.", "answer.norm.")),
}
"""By family, the prefixes of what a head of pre-training and one for fine-tuning have in common."""
# Second names, under which some programs store a tensor again. Equal copies are ignored.
COPIES = (
    ("embeddings.words.weight", "cls.predictions.decoder.weight"),
    ("masked_words.bias", "cls.predictions.decoder.bias"),
    ("embeddings.words.weight", "decoder.weight"),
    ("layers.{}.qkv.weight", "bert.encoder.layer.{}.attention.self.Wqkv"),
    ("layers.{}.qkv.bias", "bert.encoder.layer.{}.attention.self.Bqkv"),
)
BUFFERS = ("bert.embeddings.position_ids", "bert.embeddings.token_type_ids")
"""Constants that some versions store with the weights."""

ROBERTA = (
    ("bert.", "roberta."),
    ("cls.predictions.transform.dense.", "lm_head.dense."),
    ("cls.predictions.transform.LayerNorm.", "lm_head.layer_norm."),
    ("cls.predictions.", "lm_head."),
)
"""Prefixes of BERT's names, and RoBERTa's."""
ROBERTA_CLASSIFIER = (("bert.pooler.dense.", "classifier.dense."), ("classifier.", "classifier.out_proj."))
"""The same of a head for texts: its first layer is what the pooler is to BERT's."""

PREFIXES = ("module.", "bert_model_segment.", "heads_only_segment.")
"""Of PyTorch's data-parallel wrapper, and of NVIDIA's model in two segments."""
QUERY_KEY_VALUE = (("q", "query"), ("k", "key"), ("v", "value"))
VARIANTS = (
    *((f"^{re.escape(theirs)}", bert) for bert, theirs in ROBERTA_CLASSIFIER + ROBERTA),
    (r"LayerNorm\.gamma$", "LayerNorm.weight"),
    (r"LayerNorm\.beta$", "LayerNorm.bias"),
    (r"\bdense_act\b", "dense"),
    *((rf"attention\.multi_head_attention\.{one}_", f"attention.self.{layer}.") for one, layer in QUERY_KEY_VALUE),
    (r"attention\.multi_head_attention\.out_proj_", "attention.output.dense."),
    (r"attention\.layer_norm\.", "attention.output.LayerNorm."),
    *((rf"attention\.self\.W{one}$", f"attention.self.{layer}.weight") for one, layer in QUERY_KEY_VALUE),
    *((rf"attention\.self\.B{one}$", f"attention.self.{layer}.bias") for one, layer in QUERY_KEY_VALUE),
    (r"intermediate\.dense\.(weight|bias)1$", r"intermediate.dense.\1"),
    (r"intermediate\.dense\.(weight|bias)2$", r"output.dense.\1"),
)  # other names -> the usual ones: RoBERTa's, TensorFlow's of LayerNorm, and NVIDIA's of dense layers and attention


def _tensorflow_table() -> dict[str, ParameterSlice]:
    table = {theirs: ParameterSlice(ours) for ours, theirs, _ in SINGLE}
    for layers, kinds in ((DENSE, ("kernel", "bias")), (NORMS, ("gamma", "beta"))):
        for ours, theirs in layers:
            scope = theirs.replace("layer.{}", "layer_{}").replace(".", "/")
            table[f"{scope}/{kinds[0]}"] = ours.with_suffix("weight")
            table[f"{scope}/{kinds[1]}"] = ours.with_suffix("bias")
    return table


TENSORFLOW = _tensorflow_table()
TORCH = {theirs: ParameterSlice(ours) for ours, _, theirs in SINGLE} | {
    f"{theirs}.{kind}": ours.with_suffix(kind) for kind in ("weight", "bias") for ours, theirs in DENSE + NORMS
}
TRANSPOSED_IN_TENSORFLOW = "/kernel"  # the suffix of matrices that TensorFlow stores transposed
TRANSFORMERS = {"bert": TORCH, "modern": {theirs: ParameterSlice(ours) for ours, theirs in MODERN}}
"""Tables of Hugging Face's names, by family. A name in both means the same."""
TORCH_AND_COPIES = TORCH | TRANSFORMERS["modern"] | {theirs: ParameterSlice(ours) for ours, theirs in COPIES}


def find_parameter(table: dict[str, ParameterSlice], name: str) -> ParameterSlice | None:
    layer = re.search(r"(?:(?<=[._]layer[._])|(?<=\.layers\.))\d+", name.replace("/", "."))
    if layer is None:
        return table.get(name)
    found = table.get(name[: layer.start()] + "{}" + name[layer.end() :])
    return found and found._replace(parameter=found.parameter.format(int(layer[0])))


def normalize_names(names: list[str]) -> dict[str, str]:
    """PyTorch's names in a file -> the usual names."""
    normalized = {}
    for name in names:
        usual = name
        while usual.startswith(PREFIXES):
            usual = usual.split(".", 1)[1]
        for pattern, replacement in VARIANTS:
            usual = re.sub(pattern, replacement, usual)
        normalized[name] = usual
    is_modern = any("tok_embeddings" in usual for usual in normalized.values())
    prefix, heads = ("model.", MODERN_HEADS) if is_modern else ("bert.", ("cls.",))
    if not any(usual.startswith(prefix) for usual in normalized.values()):  # saved without heads
        return {name: usual if usual.startswith(heads) else f"{prefix}{usual}" for name, usual in normalized.items()}
    return normalized


def adapt_to_head(place: ParameterSlice, head: str, family: str) -> ParameterSlice:
    """The parameter in a model with this head, to which the pooler belongs, or the transform of a modern one."""
    pretraining = tuple(one for one, _ in SHARED_BY_HEADS[family])
    if head != "pretrain" and place.parameter.startswith(pretraining):
        return place._replace(parameter=in_other_head(place.parameter, family))
    return place


def in_other_head(name: str, family: str) -> str:
    """The name of a parameter that heads share in a model with the other kind of head; any other name unchanged."""
    for pair in SHARED_BY_HEADS[family]:
        for one, other in (pair, pair[::-1]):
            if name.startswith(one):
                return other + name.removeprefix(one)
    return name
