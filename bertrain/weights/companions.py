"""Read the files beside weights: the config of the model, the vocabulary and the tokenizer's settings."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from bertrain.base.errors import UserError
from bertrain.base.files import read_json
from bertrain.config import modernbert, roberta
from bertrain.config.resolve import model_from_bert_config
from bertrain.config.settings import ModelSettings
from bertrain.data.text.vocabulary import BPE_WORDS, TOKENIZER, TOKENIZER_CONFIG, Vocabulary

CONFIGS = ("bert_config.json", "config.json")
VOCABULARY = "vocab.txt"
FINETUNED_AS = (
    "model.head", "task.name", "task.text", "task.text_pair", "task.label", "task.target", "task.doc_stride",
    "task.text_split", "task.max_query_length", "task.max_answer_length", "task.n_best", "task.null_threshold",
    "data.max_seq_length", "train.precision",
)  # fmt: skip
"""The settings that say how a fine-tuned model reads texts and answers. Transformers has no field for them."""
OURS = "bertrain"  # the field of config.json that holds them as text


def model_settings(fields: dict[str, Any], path: Path) -> ModelSettings:
    """The model that the fields of the config file `path` describe."""
    if (kind := fields.get("model_type", "bert")) not in ("bert", roberta.MODEL_TYPE, modernbert.MODEL_TYPE):
        cure = "bertrain reads only BERT, RoBERTa and ModernBERT"
        raise UserError("not-bert", f"{path} has model_type {kind!r}; {cure}")
    settings = model_from_bert_config(path)
    positions = fields.get("position_embedding_type", "absolute")
    if settings.family == "bert" and positions != "absolute":
        raise UserError("not-bert", f"{path} has position_embedding_type {positions!r}; bertrain reads only 'absolute'")
    if fields.get("is_decoder") or fields.get("add_cross_attention"):
        raise UserError("not-bert", f"{path} describes a decoder (is_decoder or add_cross_attention), not BERT")
    return replace(settings, **_head_settings(fields, path))


def _head_settings(fields: dict[str, Any], path: Path) -> dict[str, Any]:
    """The settings of a fine-tuned head, by the architecture that the config names."""
    named = fields.get("architectures")
    if not isinstance(named, list):
        return {}
    architectures = [re.sub("^(ModernBert|Roberta)", "Bert", str(name)) for name in named]
    if "BertForQuestionAnswering" in architectures:
        return {"head": "span"}
    is_tagger = "BertForTokenClassification" in architectures
    if not is_tagger and "BertForSequenceClassification" not in architectures:
        return {}
    names = fields.get("id2label")
    number = len(names) if isinstance(names, dict) and names else fields.get("num_labels", 2)
    if not isinstance(number, int) or number < 1:
        raise UserError("bad-config", f"{path} has {number!r} labels; a head has one or more")
    if is_tagger:  # a head of one class predicts nothing; its tensors are left over
        return {"head": "tag", "num_labels": number} if number > 1 else {}
    if fields.get("problem_type") == "multi_label_classification":
        # One label alone is a problem of two classes, with another head: its tensors are left over.
        return {"head": "multilabel", "num_labels": number} if number > 1 else {}
    if number == 1 or fields.get("problem_type") == "regression":
        return {"head": "regress"}
    return {"head": "classify", "num_labels": number}


def labels_of(fields: dict[str, Any]) -> tuple[str, ...]:
    """The labels in a Hugging Face config by class index; empty if it has none."""
    names = fields.get("id2label")
    if not isinstance(names, dict) or sorted(names) != sorted(str(number) for number in range(len(names))):
        return ()
    return tuple(str(names[str(number)]) for number in range(len(names)))


def thresholds_of(fields: dict[str, Any]) -> dict[str, float]:
    """The thresholds in a config that we wrote, by label; empty if it has none, or others than its labels have."""
    found = fields.get("thresholds")
    if not isinstance(found, dict) or set(found) != set(labels_of(fields)):
        return {}
    are_shares = all(isinstance(value, float) and 0 <= value <= 1 for value in found.values())
    return found if are_shares else {}


def finetuned_as_of(fields: dict[str, Any], settings: ModelSettings) -> dict[str, str]:
    """The settings in a config that we wrote for this head; empty if it has none, or another head by now."""
    found = fields.get(OURS)
    if not isinstance(found, dict) or found.get("model.head") != settings.head:
        return {}
    return {key: value for key, value in found.items() if key in FINETUNED_AS and isinstance(value, str)}


def is_transformers_folder(folder: Path) -> bool:
    """Whether a folder has the config.json of Transformers, not that of a run."""
    path = folder / CONFIGS[1]
    return path.is_file() and "model_type" in read_json(path, {})


def find_vocabulary(folder: Path, vocab: Path | None = None) -> Vocabulary | None:
    """The vocabulary in the file `vocab`, or in the vocab.txt, tokenizer.json or vocab.json of `folder`, if any.

    The tokenizer settings in `folder` must be BERT's; for the file `vocab`, only lowercasing is read.
    """
    path = vocab or folder / VOCABULARY
    config = path.parent / TOKENIZER_CONFIG
    rules = read_json(config, {}) if config.is_file() else {}
    if vocab is None and not path.is_file():
        found = next((folder / name for name in (TOKENIZER, BPE_WORDS) if (folder / name).is_file()), None)
        if found is None:
            return None
        path = found
    if path.suffix == ".json":
        return Vocabulary.load(path, lower_case=rules.get("do_lower_case"))
    vocabulary = Vocabulary.load(path)
    lower_case = rules.get("do_lower_case")
    lower_case = not vocabulary.num_unreachable if lower_case is None else bool(lower_case)
    strips = rules.get("strip_accents")
    wrong = []
    if strips is not None and bool(strips) != lower_case:
        wrong.append(f"strip_accents is {str(bool(strips)).lower()}")
    if rules.get("tokenize_chinese_chars") is False:
        wrong.append("tokenize_chinese_chars is false")
    if wrong and vocab is None:
        cure = "`bertrain weights import --vocab FILE` uses that vocabulary with BERT's tokenizer"
        raise UserError("other-tokenizer", f"{config}: {' and '.join(wrong)}, unlike BERT; {cure}")
    return replace(vocabulary, lower_case=lower_case)
