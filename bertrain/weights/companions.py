"""What lies beside weights and says what they are: the model's config, the vocabulary, the rule of cases."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from bertrain.config import model_from_bert_config
from bertrain.data.tokenizer import Vocabulary
from bertrain.errors import UserError
from bertrain.settings import ModelSettings

CONFIGS = ("bert_config.json", "config.json")
VOCABULARY, TOKENIZER = "vocab.txt", "tokenizer_config.json"


def find_settings(folder: Path, config: Path | None = None) -> ModelSettings | None:
    """The model that `config`, or else the config in `folder`, describes; None where there is none."""
    path = config or next((folder / name for name in CONFIGS if (folder / name).is_file()), None)
    if path is None:
        return None
    described = read_json(path)
    settings = model_from_bert_config(path)
    if described.get("model_type", "bert") != "bert":
        raise UserError(f"{path} describes a {described['model_type']!r}, which is another model than BERT")
    if described.get("position_embedding_type", "absolute") != "absolute":
        raise UserError(f"{path} asks for {described['position_embedding_type']!r} positions; BERT's are absolute")
    return replace(settings, **_head_of(described, path))


def _head_of(described: dict[str, Any], path: Path) -> dict[str, Any]:
    """The head of a fine-tuned model, by the architecture that a config names; else nothing."""
    architectures = described.get("architectures")
    if not isinstance(architectures, list):
        return {}
    if "BertForQuestionAnswering" in architectures:
        return {"head": "span"}
    if "BertForSequenceClassification" not in architectures:
        return {}
    names = described.get("id2label")
    number = len(names) if isinstance(names, dict) and names else described.get("num_labels", 2)
    if not isinstance(number, int) or number < 1:
        raise UserError(f"{path} says that the model tells {number!r} classes apart")
    if number == 1 or described.get("problem_type") == "regression":
        return {"head": "regress"}
    return {"head": "classify", "num_labels": number}


def find_labels(folder: Path) -> tuple[str, ...]:
    """The names of the classes in a Hugging Face config, in the order of their numbers; none where it has none."""
    path = folder / CONFIGS[1]
    names = read_json(path).get("id2label") if path.is_file() else None
    if not isinstance(names, dict) or sorted(names) != sorted(str(number) for number in range(len(names))):
        return ()
    return tuple(str(names[str(number)]) for number in range(len(names)))


def find_vocabulary(folder: Path, vocab: Path | None = None) -> Vocabulary | None:
    """The words of `vocab`, or else of the vocab.txt in `folder`; None where there is none."""
    path = vocab or folder / VOCABULARY
    if vocab is None and not path.is_file():
        return None
    vocabulary = Vocabulary.load(path)
    tokenizer = path.parent / TOKENIZER
    said = read_json(tokenizer).get("do_lower_case") if tokenizer.is_file() else None
    return Vocabulary(vocabulary.words, lower_case=bool(said) if said is not None else not _has_capitals(vocabulary))


def _has_capitals(vocabulary: Vocabulary) -> bool:
    """Whether any word but the special ones ([PAD], [unused1]) has a capital letter: text was then not lowered."""
    return any(word != word.lower() for word in vocabulary.words if not (word[:1] == "[" and word[-1:] == "]"))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object in a file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError):
        raise UserError(f"{path} is not JSON in UTF-8") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} is not a JSON object")
    return content
