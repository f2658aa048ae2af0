"""The share of words to predict: models of `bertrain train`, each trained for the same time, by their held-out loss.

    python benchmarks/masking.py TEXT... --held-out FILE --work FOLDER [--minutes 5] [--shares 0.15 0.3] [--seeds 1 2]

`bertrain train` chooses size, vocabulary, batch and rate for TEXT and the time, and prepares the data; then every share
is trained from its recipe with every seed. More words to predict make a step longer, so each share gets as many steps
as it makes in the time: the seconds of a step are the median of short runs that take turns, so that a busy machine
slows all shares. The loss is that of FILE (a sentence per line), prepared once with 15 % of the words masked. Adds to
benchmarks/results/masking.json; what FOLDER has of an earlier start is not computed again.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from held_out import bertrain, evaluate, mask_held_out, steps_of

from bertrain.base.machine import cpu_name
from bertrain.run.folder import Run

RESULTS = Path(__file__).parent / "results" / "masking.json"
TURNS, TIMED_STEPS = 3, 20


def prepare(work: Path, texts: list[Path], held_out: Path, minutes: float) -> None:
    """What `bertrain train` makes of the text in this time, after a first short run, and the held-out masks."""
    chosen = work / "chosen"
    if not (chosen / "recipe.toml").exists():
        bertrain("train", *texts, "--out", chosen, "--budget", f"{minutes}m", "--max-steps", 10)
    mask_held_out(work, held_out, chosen / "vocab.txt")


def settings_of(share: float) -> tuple[object, ...]:
    return "--data.mask_probability", share, "--data.max_predictions", 0, "--train.fits", "", "--train.budget", ""


def step_seconds(work: Path, shares: list[float]) -> dict[float, float]:
    """The median of all turns."""
    kept = work / "step-seconds.json"
    if not kept.exists():
        found: dict[float, list[float]] = {share: [] for share in shares}
        for turn in range(TURNS):
            for share in shares:
                run = work / f"speed-{share}-{turn}"
                train(work, run, share, TIMED_STEPS, 1)
                ends = [step["ended"] for step in steps_of(run)][TIMED_STEPS // 4 :]
                found[share] += [after - before for before, after in pairwise(ends)]
        kept.write_text(json.dumps([[share, statistics.median(seconds)] for share, seconds in found.items()]))
    return dict(json.loads(kept.read_text()))


def train(work: Path, run: Path, share: float, steps: int, seed: int) -> None:
    quiet = ("--log.level", "quiet", "--log.every_steps", 1, "--evaluate.every_samples", 0)
    where = ("--data", work / "chosen" / "data", "--run", run)
    bertrain(
        "pretrain", work / "chosen" / "recipe.toml", *where, *settings_of(share), *quiet, "--max-steps", steps,
        "--seed", seed,
    )  # fmt: skip


def measure(work: Path, share: float, steps: int, seed: int) -> dict[str, Any]:
    run = work / f"run-{share}-{seed}"
    if not run.exists():
        train(work, run, share, steps, seed)
    return {
        "share": share,
        "seed": seed,
        "steps": steps,
        **evaluate(run, work),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=Path, nargs="+")
    parser.add_argument("--held-out", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.15, 0.3])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    prepare(options.work, options.texts, options.held_out, options.minutes)
    seconds = step_seconds(options.work, options.shares)
    rows = []
    for seed in options.seeds:
        for share in options.shares:
            rows.append(measure(options.work, share, int(60 * options.minutes / seconds[share]), seed))
            print(rows[-1], flush=True)
    run = Run.open(options.work / f"run-{options.shares[0]}-{options.seeds[0]}")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else cpu_name()
    record = {
        "text_bytes": sum(path.stat().st_size for path in options.texts), "minutes": options.minutes,
        "layers": run.settings.model.num_layers, "hidden_size": run.settings.model.hidden_size,
        "device": device, "torch": torch.__version__, "python": platform.python_version(),
        "step_seconds": seconds, "rows": rows,
    }  # fmt: skip
    records = json.loads(options.output.read_text()) if options.output.exists() else []
    options.output.write_text(json.dumps([*records, record], indent=1) + "\n")


if __name__ == "__main__":
    main()
