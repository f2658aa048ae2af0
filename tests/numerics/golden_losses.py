"""The losses of a small training in each precision of a CPU, kept in tests/golden/losses-by-precision.json.

    python -m tests.numerics.golden_losses

writes that file anew: do so when the training is meant to change, and look at the difference. `--print` prints the
losses instead, for comparing instruction sets (`--train.isa`'s variables in the environment).
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from bertrain.train.pretrain import pretrain
from tests import helpers

FILE = Path(__file__).parents[1] / "golden" / "losses-by-precision.json"
PRECISIONS = ("fp32", "bf32", "bf16", "fp16")


def losses_in(precision: str, folder: Path) -> list[float]:
    """Twelve steps with dropout on, past the warm-up, of a model whose weights are large enough to show rounding."""
    settings = helpers.tiny_settings(
        train__precision=precision, train__device="cpu", train__max_steps=12, model__hidden_size=64,
        model__intermediate_size=128, model__initializer_range=0.2, log__level="quiet",
    )  # fmt: skip
    data = folder / "data"
    if not data.exists():
        helpers.make_data(folder)
    run = folder / precision
    pretrain(settings, data, run)
    return helpers.losses(run)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        losses = {precision: losses_in(precision, Path(folder)) for precision in PRECISIONS}
    text = json.dumps(losses, indent=1) + "\n"
    if "--print" in sys.argv:
        print(text)
    else:
        FILE.write_text(text)


if __name__ == "__main__":
    main()
