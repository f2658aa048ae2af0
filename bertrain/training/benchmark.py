"""`bertrain pretrain --benchmark`: the real loop on real data for some steps, timed; nothing is kept."""

from __future__ import annotations

import resource
import statistics
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bertrain.base.machine import cpu_name
from bertrain.config.settings import CheckpointSettings, EvaluateSettings, Settings
from bertrain.ranks import parallel
from bertrain.run.folder import Run
from bertrain.run.records import StepRecord, read_records
from bertrain.training import engine
from bertrain.training.loop import train
from bertrain.training.replacing_engine import read_generator, write_generator
from bertrain.training.resolved_run import resolve_run


def only_steps(settings: Settings, max_steps: int) -> Settings:
    """The settings with nothing but this many full steps: no other limit, no evaluation, no checkpoint."""
    train = replace(settings.train, max_time="", budget="", fits="", skip_steps="", epochs=0, max_samples=0)
    checkpoint = CheckpointSettings(enabled=False)
    train = replace(train, max_steps=max_steps)
    batch = settings.batch.without_ramp()
    return replace(settings, batch=batch, train=train, evaluate=EvaluateSettings(), checkpoint=checkpoint)


def benchmark(settings: Settings, data: str | Path, *, steps: int = 100, warm_up: int = 10) -> dict[str, Any]:
    """Train `warm_up` and then `steps` steps as `pretrain` would, and return the metrics of the latter.

    Loader, metrics and console run as always. There is no evaluation and no checkpoint, and the run folder is
    temporary. Tokens per second are of all ranks together, over all timed steps.
    """
    settings = only_steps(settings, warm_up + steps)
    with parallel.join(settings.train) as ranks, tempfile.TemporaryDirectory() as folder:
        resolved = resolve_run(settings, data, Path(folder) / "run", ranks=ranks).draw(ranks)
        settings = resolved.settings
        if not ranks.is_first:  # whose temporary folder another node could not see
            write = partial(write_generator, read_generator(settings, resolved.data)) if settings.model.rtd else None
            Run.create(Path(folder) / "run", settings, resolved.data, "", "", write_generator=write)
        train(resolved, ranks)
        if not ranks.is_first:
            return {}
        records = read_records(Path(folder) / "run" / "metrics.jsonl")
        timed = [record for record in records if isinstance(record, StepRecord)][warm_up:]
        on_gpu = ranks.device.type == "cuda"
        seconds = [step.duration for step in timed]
        in_process = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        peak = torch.cuda.max_memory_allocated(ranks.device) if on_gpu else in_process
        samples = timed[-1].samples - timed[0].samples
        return {
            "ms_per_step": 1e3 * statistics.median(seconds),
            "real_tokens_per_s": sum(step.tokens for step in timed) / sum(seconds),
            "sequences_per_s": samples / sum(seconds[1:]) if steps > 1 else 0.0,
            "phase_ms": {
                name: 1e3 * statistics.median(one.seconds[name] for one in timed) for name in timed[0].seconds
            },
            "steps": steps,
            "warm_up_steps": warm_up,
            "ranks": ranks.world,
            "threads": torch.get_num_threads(),
            "device": torch.cuda.get_device_name(ranks.device) if on_gpu else cpu_name(),
            "computing_with": engine.choose(settings, ranks.device)[1],
            "precision": settings.train.precision,
            "token_budget": settings.batch.token_budget,
            "peak_memory_gib": peak / 2**30,
            "last_loss": timed[-1].loss,
        }
