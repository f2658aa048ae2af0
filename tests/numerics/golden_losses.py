"""The losses of small trainings in each precision of a CPU, kept in tests/golden.

    python -m tests.numerics.golden_losses

writes both files anew: do so when the training is meant to change, and look at the difference. `--print` prints the
short ones instead, for comparing instruction sets (`--train.isa`'s variables in the environment).
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from bertrain.training.start import pretrain
from tests import helpers

GOLDEN = Path(__file__).parents[1] / "golden"
FILE = GOLDEN / "losses-by-precision.json"
CURVES = GOLDEN / "curves-of-300-steps.json"
PRECISIONS = ("fp32", "bf32", "bf16", "fp16")
SEEDS = (1, 2, 3)
BLOCK = 30  # steps whose mean is a point of a curve


def losses_in(precision: str, folder: Path) -> list[float]:
    """Twelve steps with dropout on, past the warm-up, of a model whose weights are large enough to show rounding."""
    settings = helpers.tiny_settings(
        train__precision=precision, train__device="cpu", train__kernels="plain", train__max_steps=12,
        model__hidden_size=64, model__intermediate_size=128, model__initializer_range=0.2, log__level="quiet",
    )  # fmt: skip
    data = folder / "data"
    if not data.exists():
        helpers.make_data(folder)
    run = folder / precision
    pretrain(settings, data, run)
    return helpers.losses(run)


def curve_of(precision: str, seed: int, folder: Path, **overrides: object) -> list[float]:
    """Means of each 30 losses of 300 steps of a small BERT, dropout on, as a user would train it."""
    settings = helpers.tiny_settings(
        train__precision=precision, train__device="cpu", train__seed=seed, train__max_steps=300, log__level="quiet",
        model__hidden_size=128, model__num_heads=4, model__intermediate_size=512, model__hidden_dropout=0.1,
        model__attention_dropout=0.1, optimizer__learning_rate=1e-3, schedule__warmup_steps=30,
        batch__token_budget=1024,
        **overrides,
    )  # fmt: skip
    data = folder / "data"
    if not data.exists():
        helpers.make_data(folder)
    run = folder / f"{precision}-{seed}-{len(list(folder.iterdir()))}"
    pretrain(settings, data, run)
    losses = helpers.losses(run)
    return [sum(losses[first : first + BLOCK]) / BLOCK for first in range(0, len(losses), BLOCK)]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        losses = {precision: losses_in(precision, Path(folder)) for precision in PRECISIONS}
    text = json.dumps(losses, indent=1) + "\n"
    if "--print" in sys.argv:
        print(text)
        return
    FILE.write_text(text)
    with tempfile.TemporaryDirectory() as folder:
        curves = {str(seed): curve_of("fp32", seed, Path(folder)) for seed in SEEDS}
    CURVES.write_text(json.dumps({"fp32": curves}, indent=1) + "\n")


if __name__ == "__main__":
    main()
