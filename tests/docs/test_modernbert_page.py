"""The commands of docs/how-to-modernbert.md run as written, on a tiny random ModernBERT and a small BPE."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bertrain.run.folder import Run
from tests import bpe, helpers
from tests.docs.test_documents import DOCS, commands_of, words_of
from tests.miniature_tasks import command_line

transformers = pytest.importorskip("transformers")
SHORTER = (
    "--train.max_steps",
    "3",
    "--train.precision",
    "fp32",
    "--batch.sequences",
    "8",
    "--log.trackers",
    "none",
)

SMALL = (  # in place of ModernBERT-Base's
    "--model.hidden_size",
    "32",
    "--model.num_layers",
    "3",
    "--model.num_heads",
    "2",
    "--model.intermediate_size",
    "48",
)


def test_the_page_runs_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    helpers.write_corpus(tmp_path / "own.txt", documents=300)
    tokenizer = bpe.write_bpe(tmp_path / "modernbert")
    config = transformers.ModernBertConfig(
        vocab_size=bpe.size_of(tokenizer), hidden_size=32, num_hidden_layers=3, num_attention_heads=2,
        intermediate_size=48, local_attention=16, pad_token_id=3, cls_token_id=1, bos_token_id=1, sep_token_id=2,
        eos_token_id=2,
    )  # fmt: skip
    transformers.ModernBertForMaskedLM(config).save_pretrained(tmp_path / "modernbert")
    (tmp_path / "labels").mkdir()
    for name in ("train", "dev"):
        rows = [{"text": word, "label": word[:2]} for word in helpers.vocabulary_words()]
        (tmp_path / "labels" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = (DOCS / "how-to-modernbert.md").read_text()
    commands = [words_of(command) for command, is_whole in commands_of(page) if is_whole]
    verbs = [words[0] for words in commands]
    assert verbs == ["train", "data", "pretrain", "fill-mask", "finetune", "weights", "weights", "pretrain", "anneal"]
    for words in commands:
        shorter = {
            "train": SHORTER, "pretrain": SHORTER, "finetune": SHORTER, "anneal": ("--max-samples", "40"),
        }.get(words[0], ())  # fmt: skip
        if "runs/stable" in words and words[0] == "pretrain":
            shorter += ("--schedule.warmup_steps", "1", "--batch.ramp_from", "2", "--batch.ramp_tokens", "300")
            shorter += SMALL
        command_line(*words, *shorter)
    assert Run.open(tmp_path / "runs" / "annealed").settings.optimizer.name == "stableadamw"
    model = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "continued")
    assert type(model).__name__ == "ModernBertForMaskedLM"
    assert model.config.local_attention == 16
    text = "bato sevi"
    one, other = (transformers.AutoTokenizer.from_pretrained(tmp_path / name) for name in ("modernbert", "continued"))
    assert one(text)["input_ids"] == other(text)["input_ids"]
