"""Fine-tuning: runs of a task.

finetune        one run
finetune_many   several seeds or tasks, one after another, and a table of their metrics
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from bertrain.base.machine import is_first_rank
from bertrain.config.settings import Settings
from bertrain.ranks import parallel
from bertrain.training.resolved_run import ResolvedRun, resolve_run
from bertrain.training.start import Trained, start
from bertrain.training.task_results import RESULTS, Outcome, write_results


def finetune(settings: Settings, data: str | Path, run: str | Path, *, init: str) -> Trained:
    """Fine-tune the weights `init` for the task of `settings` on the files in `data`; starts or continues `run`.

    Example: bertrain.finetune(bertrain.resolve_task("classify"), "labels", "runs/labels", init="runs/tiny")
    """
    with parallel.join(settings.train) as ranks:
        return start(resolve_run(settings, data, run, init=init, ranks=ranks), ranks)


def finetune_many(
    settings: Mapping[str, Settings],
    data: str | Path,
    run: str | Path,
    *,
    init: str,
    seeds: Sequence[int],
    predicts: bool = False,
) -> list[Outcome]:
    """Fine-tune for each task and seed, each into its own folder under `run`; finished runs are not repeated.

    `settings` are by task. The table is also written to `results.json` there, after every run. With `predicts`, the
    splits without answers are read before training, so that a damaged file is refused at once.
    """

    def folder(task: str, seed: int) -> Path:
        return run_folder(run, task, seed, len(settings), len(seeds))

    if len(settings) > 1:  # a fault in the last task is reported now, not after hours of the others
        for name, of_task in settings.items():
            checked = resolve_run(of_task, data, folder(name, seeds[0]), init=init, world=parallel.count_ranks())
            if predicts and checked.task is not None:
                checked.task.to_predict()
    outcomes: list[Outcome] = []
    for name, of_task in settings.items():
        found: list[Path] = []
        resolved: ResolvedRun | None = None
        for seed in seeds:
            seeded = replace(of_task, train=replace(of_task.train, seed=seed))
            place = folder(name, seed)
            with parallel.join(seeded.train) as ranks:
                resolved = resolve_run(seeded, data, place, init=init, ranks=ranks, same_task=resolved)
                if predicts and not found and resolved.task is not None:
                    resolved.task.to_predict()
                start(resolved, ranks)
            found.append(place)
            outcome = Outcome.of(name, seeds, found)
            if is_first_rank():
                write_results([*outcomes, outcome], Path(run) / RESULTS)
        outcomes.append(outcome)
    return outcomes


def run_folder(run: str | Path, task: str, seed: int, num_tasks: int, num_seeds: int) -> Path:
    """The folder of one run of several: RUN, RUN/seed-1, RUN/mnli or RUN/mnli/seed-1."""
    place = Path(run) / task.rpartition("/")[2] if num_tasks > 1 else Path(run)
    return place / f"seed-{seed}" if num_seeds > 1 else place
