"""A small byte-level BPE, as ModernBERT's and RoBERTa's, trained by the library tokenizers on a test's own text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests import helpers

BERT_LIKE = ("[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]")  # in ModernBERT's order
ROBERTA_LIKE = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")


def write_bpe(folder: Path, *, size: int = 400, special: tuple[str, ...] = BERT_LIKE) -> Path:
    """FOLDER/tokenizer.json, trained on the words of `helpers.write_corpus`; the path of the file."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    folder.mkdir(parents=True, exist_ok=True)
    pipeline: Any = Tokenizer(models.BPE())
    pipeline.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pipeline.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    pipeline.train_from_iterator([helpers.write_corpus(folder / "bpe.txt").read_text()], trainer)
    first, last = ("[CLS]", "[SEP]") if "[CLS]" in special else ("<s>", "</s>")
    mask = "[MASK]" if "[MASK]" in special else "<mask>"
    pipeline.add_special_tokens([AddedToken(mask, lstrip=True, special=True)])
    ends = [(word, pipeline.token_to_id(word)) for word in (first, last)]
    pipeline.post_processor = processors.TemplateProcessing(f"{first} $A {last}", special_tokens=ends)
    pipeline.save(str(folder / "tokenizer.json"))
    roles = {"pad": "ad", "unk": "nk", "mask": "ask"}
    named = {f"{role}_token": next(w for w in special if part in w.lower()) for role, part in roles.items()}
    helpers.write_json(folder / "tokenizer_config.json", named | {
        "cls_token": first, "sep_token": last, "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": ["input_ids", "attention_mask"],
    })  # fmt: skip
    return folder / "tokenizer.json"


def size_of(path: Path) -> int:
    return len(json.loads(path.read_text())["model"]["vocab"])
