"""The inputs of the five systems in miniature, in their own layouts: MLPerf's download, and what belongs to it."""

from __future__ import annotations

import hashlib
import random
import shutil
from pathlib import Path

import numpy as np
from safetensors.torch import load_file

from bertrain.training.start import pretrain
from bertrain.weights.export import export
from tests import bundles, helpers, miniature_tasks
from tests.quick.test_weights_formats import tensorflow_name

CHECKPOINT = "model.ckpt-28252"


def write_phase1(folder: Path, checkpoint: str = CHECKPOINT) -> Path:
    """A TensorFlow 1 checkpoint of a tiny BERT of 512 positions, with optimizer slots, its config and vocabulary."""
    work = folder.parent / f"{folder.name}-work"
    work.mkdir(parents=True)
    settings = helpers.tiny_settings(train__max_steps=1, model__max_positions=512, model__pad_vocab_to=1)
    pretrain(settings, helpers.make_data(work), work / "run")
    exported = export(work / "run", work / "exported")
    values = {}
    for name, tensor in load_file(exported / "model.safetensors").items():
        theirs = tensorflow_name(name)
        values[theirs] = np.ascontiguousarray(tensor.numpy().T if theirs.endswith("/kernel") else tensor.numpy())
        values[f"{theirs}/adam_m"] = values[theirs]
    folder.mkdir(parents=True, exist_ok=True)
    bundles.write_bundle(folder / checkpoint, values)
    shutil.copy(exported / "config.json", folder / "bert_config.json")
    shutil.copy(exported / "vocab.txt", folder)
    shutil.rmtree(work)
    return folder


def write_download(out: Path, *, parts: int = 2, documents: int = 12) -> Path:
    """OUT/phase1 and OUT/download as MLPerf publishes them: text in parts, held-out text, and MD5 sums beside it."""
    write_phase1(out / "phase1")
    text = out / "download" / "results4"
    text.mkdir(parents=True)
    draw = random.Random(0)
    for number, name in enumerate([*(f"part-{number:05d}-of-{parts:05d}" for number in range(parts)), "eval.txt"]):
        corpus = helpers.write_corpus(text / name, documents=documents, seed=number)
        lines = corpus.read_text().splitlines(keepends=True)
        joined = [line for line in lines if line.strip() or draw.random() < 0.25]  # documents of up to 512 tokens
        corpus.write_text("".join([*joined, "\n"]))
    lines = [f"{hashlib.md5(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(text.iterdir())]
    (out / "download" / "bert_reference_results_text_md5.txt").write_text("".join(lines))
    (text / "eval.md5").write_text("0" * 32 + "  eval.txt\n")
    return out


def write_glue(folder: Path) -> Path:
    """MNLI and SST-2 in GLUE's layout, a few lines of each."""
    for place, length in (("MNLI/train_subset_10k.tsv", 49), ("SST-2/train.tsv", 49), ("SST-2/dev.tsv", 13)):
        lines = (helpers.DATA / "glue" / place).read_text().splitlines(keepends=True)
        made = folder / place.replace("_subset_10k", "")
        made.parent.mkdir(parents=True, exist_ok=True)
        made.write_text("".join(lines[:length]))
    lines = (helpers.DATA / "glue" / "MNLI" / "dev_matched.jsonl").read_text().splitlines(keepends=True)
    (folder / "MNLI" / "dev_matched.jsonl").write_text("".join(lines[:12]))
    return folder


def write_squad(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name, count, seed in (("train", 24, 1), ("dev", 8, 2)):
        (folder / f"{name}-v1.1.json").write_text(miniature_tasks.questions(count, seed))
    return folder
