"""What lies beside weights and says what they are: the model's config, the vocabulary, the rule of cases."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from bertrain.base.errors import UserError
from bertrain.config.resolve import model_from_bert_config
from bertrain.config.settings import ModelSettings
from bertrain.data.text.vocabulary import Vocabulary

CONFIGS = ("bert_config.json", "config.json")
VOCABULARY, TOKENIZER, WORD_PIECES = "vocab.txt", "tokenizer_config.json", "tokenizer.json"


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
    if described.get("is_decoder") or described.get("add_cross_attention"):
        raise UserError(f"{path} describes a decoder, which is another model than BERT")
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
    if described.get("problem_type") == "multi_label_classification":
        return {}  # there is no such head here: its tensors are left over, and named
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
    """The words of `vocab`, or else those in `folder`: its vocab.txt, or its tokenizer.json; None where there is none.

    Words in `folder` come with rules for the text before them, which must be BERT's; `vocab` is taken by BERT's.
    """
    path = vocab or folder / VOCABULARY
    described = path.parent / TOKENIZER
    rules = read_json(described) if described.is_file() else {}
    if vocab is None and not path.is_file():
        path = described = folder / WORD_PIECES
        if not path.is_file():
            return None
        vocabulary, rules = _read_word_pieces(path)
    else:
        vocabulary = Vocabulary.load(path)
    said = rules.get("do_lower_case")
    lower_case = bool(said) if said is not None else not _has_capitals(vocabulary)
    if vocab is None:
        _refuse_other_rules(rules, lower_case, described)
    return replace(vocabulary, lower_case=lower_case)


def _read_word_pieces(path: Path) -> tuple[Vocabulary, dict[str, Any]]:
    """The words in a tokenizer.json, and its rules under the names that a tokenizer_config.json has for them."""
    content = read_json(path)
    model, normalizer = content.get("model"), content.get("normalizer")
    numbers = model.get("vocab") if isinstance(model, dict) and model.get("type") == "WordPiece" else None
    if not isinstance(numbers, dict) or sorted(map(str, numbers.values())) != sorted(map(str, range(len(numbers)))):
        raise UserError(f"{path} holds no WordPiece vocabulary, numbered without gaps, as BERT's is")
    rules: dict[str, Any] = {}
    if isinstance(normalizer, dict) and normalizer.get("type") == "BertNormalizer":
        rules = {
            "do_lower_case": normalizer.get("lowercase"),
            "strip_accents": normalizer.get("strip_accents"),
            "tokenize_chinese_chars": normalizer.get("handle_chinese_chars"),
        }
    return Vocabulary.of(sorted(numbers, key=lambda word: int(numbers[word])), path), rules


def _refuse_other_rules(rules: dict[str, Any], lower_case: bool, path: Path) -> None:
    strips = rules.get("strip_accents")
    wrong = []
    if strips is not None and bool(strips) != lower_case:
        wrong.append(f"strip_accents is {str(bool(strips)).lower()}")
    if rules.get("tokenize_chinese_chars") is False:
        wrong.append("tokenize_chinese_chars is false")
    if wrong:
        raise UserError(
            f"{path} says that {' and '.join(wrong)}, which is not how BERT's own tokenizer works; "
            "`bertrain weights import --vocab` takes its vocab.txt by BERT's rules"
        )


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
