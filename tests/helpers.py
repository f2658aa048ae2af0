"""What several tests need: a small corpus, prepared folders, runs of the command line, Hugging Face twins."""

from __future__ import annotations

import json
import os
import platform
import random
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bertrain.base import isa
from bertrain.base.errors import UserError
from bertrain.base.formatting import COLUMNS
from bertrain.base.machine import cpu_flags
from bertrain.config.resolve import resolve
from bertrain.config.settings import ModelSettings, Settings
from bertrain.data.feed.assemble import assemble_batch
from bertrain.data.feed.batching import Capacity, choose_policy
from bertrain.data.formats.block import Block, Masks, concatenate, in_batches
from bertrain.data.formats.packing import plan_packing
from bertrain.data.formats.write import write_blocks
from bertrain.data.prepare.prepare import prepare
from bertrain.data.text.vocabulary import Vocabulary
from bertrain.model.batch import IGNORED, Batch
from bertrain.model.bert import Bert
from bertrain.model.encoder import EncoderModel
from bertrain.model.families import new_model
from bertrain.weights.tensors import huggingface_names

SHARED = Path(__file__).parents[2] / "shared"
"""Larger data of other people, beside the checkout where there is any."""
SHARED_DATA = SHARED / "data"
DATA = Path(__file__).parent / "data"
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]

TINY = {
    "model.hidden_size": "32",
    "model.num_layers": "2",
    "model.num_heads": "2",
    "model.intermediate_size": "64",
    "model.max_positions": "64",
    "data.max_seq_length": "64",
    "data.max_predictions": "10",
    "batch.sequences": "24",
    "batch.token_budget": "256",
    "schedule.warmup_steps": "2",
    "train.max_steps": "20",
    "train.precision": "fp32",
    "train.threads": "1",
    "log.trackers": "none",
}
"""Overrides of bert-tiny that make a run of seconds."""

FAMILIES: dict[str, dict[str, object]] = {
    "bert": {},
    "modern": {
        "model__family": "modern", "model__local_window": 8, "model__global_every": 2, "model__hidden_dropout": 0.1,
        "model__attention_dropout": 0.1,
    },
}  # fmt: skip
"""What makes a tiny run one of each family, both with dropout, and with windows shorter than the sequences."""

needs_short_floats = pytest.mark.skipif(
    platform.machine() == "aarch64" and "bf16" not in cpu_flags(),
    reason="this CPU multiplies floats of 16 bits in software, hundreds of times slower than fp32",
)


def allow_emulated_fp16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take fp16, which is refused on CPUs without instructions for it, on any CPU: it is slow, but computes."""
    monkeypatch.setattr(isa, "emulation", lambda precision, wish: "")


def packed_rows(lengths: np.ndarray, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """All rows of a packing: row r holds the sequences indices[offsets[r] : offsets[r + 1]]."""
    packing = plan_packing(lengths, **options)
    return packing.rows(0, len(packing))


def write_corpus(path: Path, *, documents: int = 40, seed: int = 0) -> Path:
    """Text with something to learn: a document keeps to the eight words of its topic."""
    words = vocabulary_words() + [word + "tose" for word in vocabulary_words()[:6]]  # these are three pieces each
    topics = [words[first::6] for first in range(6)]
    draw = random.Random(seed)
    lines = []
    for _ in range(documents):
        topic = draw.choice(topics)
        for _ in range(draw.randint(3, 12)):
            lines.append(" ".join(draw.choices(topic, k=draw.randint(4, 15))))
        lines.append("")
    path.write_text("\n".join(lines) + "\n")
    return path


def vocabulary_words() -> list[str]:
    return [a + b for a in ("ba", "ke", "li", "mo", "nu", "ra") for b in ("to", "se", "vi", "da", "fu", "go", "pe")]


def write_vocabulary(path: Path) -> Path:
    pieces = ["##" + word[2:] for word in vocabulary_words()[:7]]
    path.write_text("\n".join([*SPECIAL, *vocabulary_words(), *pieces]) + "\n")
    return path


def make_data(
    folder: Path, *, documents: int = 40, max_seq_length: int = 64, seed: int = 0, cased: bool = False
) -> Path:
    """A prepared data folder at folder/data, from a corpus of its own vocabulary."""
    folder.mkdir(parents=True, exist_ok=True)
    prepare(
        [write_corpus(folder / "corpus.txt", documents=documents, seed=seed)],
        folder / "data",
        vocab=write_vocabulary(folder / "vocab.txt"),
        max_seq_length=max_seq_length,
        lower_case=not cased,
    )
    return folder / "data"


def example(
    tokens: list[int], segment_b: int, is_random: bool, positions: list[int] | None = None, labels: Sequence[int] = ()
) -> Block:
    """A block of one example, masked if it has `positions`."""
    masks = None
    if positions is not None:
        masks = Masks(np.array([len(positions)]), np.array(positions, np.int64), np.array(labels, np.int64))
    return Block(np.array(tokens), np.array([len(tokens)]), np.array([segment_b]), np.array([is_random]), masks)


def write_examples(
    folder: Path, examples: Sequence[Block], vocabulary: Vocabulary, *, rows_per_shard: int = 65536, **preparation: Any
) -> None:
    """Write a prepared folder of blocks of one example each."""
    blocks = map(concatenate, in_batches(examples, rows_per_shard))
    write_blocks(folder, blocks, vocabulary, preparation=preparation)


def examples_of(block: Block) -> list[dict[str, Any]]:
    """The examples of a block, each a plain dictionary; without `positions` and `labels` where it is unmasked."""
    found = []
    for number in range(len(block)):
        one = block.take(np.array([number]))
        example = {
            "tokens": one.tokens.tolist(),
            "segment_b": int(one.segment_b[0]),
            "is_random": int(one.is_random[0]),
        }
        if one.masks is not None:
            example |= {"positions": one.masks.positions.tolist(), "labels": one.masks.labels.tolist()}
        found.append(example)
    return found


def vocab_size() -> int:
    return len(SPECIAL) + len(vocabulary_words()) + 7


def tiny_settings(**overrides: object) -> Settings:
    """Settings of a run of seconds; keys with __ for the dot."""
    given = {key.replace("__", "."): str(value).lower() for key, value in overrides.items()}
    return resolve("bert-tiny", list(({"model.vocab_size": str(vocab_size())} | TINY | given).items()))


def tiny_arguments(**overrides: object) -> list[str]:
    """The same as command-line arguments."""
    given = {key.replace("__", "."): str(value).lower() for key, value in overrides.items()}
    values = {"model.vocab_size": str(vocab_size())} | TINY | given
    return [word for key, value in values.items() for word in (f"--{key}", value)]


@contextmanager
def refused(code: str, *named: object, kind: type[UserError] = UserError) -> Iterator[pytest.ExceptionInfo[UserError]]:
    """Expect a user error of this code, whose sentence names each of `named`: a file, a line, a value."""
    with pytest.raises(kind) as caught:
        yield caught
    assert caught.value.code == code, f"{caught.value} [{caught.value.code}]"
    for value in named:
        assert str(value) in str(caught.value), caught.value


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "bertrain", *map(str, arguments)]


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}


def bertrain(*arguments: object, check: bool = True, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own; what it printed is unwrapped."""
    done = subprocess.run(
        command(*arguments), capture_output=True, text=True, env=environment(), timeout=timeout, check=False
    )
    done.stdout, done.stderr = unwrapped(done.stdout), unwrapped(done.stderr)
    assert not check or done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


INDENTS = (2, 10)  # of lines that `wrap` made


def unwrapped(text: str) -> str:
    """What was said, with the lines joined again that `wrap` made: further in, and their first word had no room."""
    said: list[str] = []
    before, margin = "", 0  # the line as it was printed, and the margin of the one that was wrapped
    for line in text.split("\n"):
        first = re.match(r"( *)((?:`[^`]*`|\S)+)", line)
        is_ours = len(before) <= COLUMNS or len(re.findall(r"(?:`[^`]*`|\S)+", before)) == 1
        is_further = first is not None and len(first[1]) - margin in INDENTS
        if first and is_ours and is_further and len(before) + 1 + len(first[2]) > COLUMNS:
            said[-1] += f" {line.lstrip()}"
        else:
            said.append(line)
            margin = len(first[1]) if first else 0
        before = line
    return "\n".join(said)


def losses(run: Path, first: int | None = 1) -> list[float]:
    """The loss of each step, which must stand there once and in order, from step `first` on (None: any)."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if record["kind"] == "step"]
    begin = steps[0]["step"] if first is None else first
    assert [record["step"] for record in steps] == list(range(begin, begin + len(steps)))
    return [record["loss"] for record in steps]


def final_weights(run: Path) -> dict[str, torch.Tensor]:
    return load_weights(sorted((run / "checkpoints").glob("step-*"))[-1])


def load_weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    mapped = load_file(checkpoint / "model.safetensors")
    return {name: tensor.clone() for name, tensor in mapped.items()}


def write_json(path: Path, content: object) -> Path:
    path.write_text(json.dumps(content))
    return path


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    actual, expected = actual.detach(), expected.detach()
    return float((actual - expected).norm() / expected.norm().clamp(min=1e-30))


def build_model(settings: ModelSettings, seed: int = 1) -> EncoderModel:
    """A model whose every tensor is random, biases and LayerNorm too, so that no term can hide."""
    model = new_model(settings)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean = 1.0 if name.endswith("norm.weight") else 0.0
            parameter.copy_(mean + 0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def one_sequence(tokens: list[int], positions: list[int]) -> Batch:
    """A batch of a single sequence of one segment, with tokens to predict at `positions`."""
    length, count = len(tokens), len(positions)
    masks = Masks(np.array([count]), np.array(positions), np.full(count, IGNORED))
    block = Block(np.array(tokens), np.array([length]), np.array([length]), np.array([0]), masks)
    policy, shape = choose_policy("budget"), Capacity(length, 1, count)
    return assemble_batch(block, policy=policy, shape=shape, max_seq_length=length, pad_id=0, dropout_seed=0)


def third_of(tensor: torch.Tensor, third: int) -> torch.Tensor:
    return tensor if third < 0 else tensor.chunk(3)[third]


def huggingface_twin(model: Bert) -> Any:
    """Hugging Face's BertForPreTraining with the weights of `model` and no dropout."""
    from transformers import BertConfig, BertForPreTraining

    settings = model.settings
    twin = BertForPreTraining(
        BertConfig(
            vocab_size=settings.vocab_size,
            hidden_size=settings.hidden_size,
            num_hidden_layers=settings.num_layers,
            num_attention_heads=settings.num_heads,
            intermediate_size=settings.intermediate_size,
            max_position_embeddings=settings.max_positions,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            layer_norm_eps=settings.layer_norm_eps,
        )
    )
    ours, names = dict(model.named_parameters()), huggingface_names(settings)
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            our_name, third = names[name]
            parameter.copy_(third_of(ours[our_name], third)[: parameter.shape[0]])
    return twin
