"""Samples that MLPerf's BERT needs to reach its target, from the reference convergence points (RCP) of MLPerf.

They are of training BERT-Large from MLPerf's initial checkpoint to 0.720 masked-word accuracy with LAMB, by global
batch size: rcps_bert.json in mlcommons/logging, rules 4.1 to 5.1. As in MLPerf's own checker: straight lines between
points, from the fastest point on; points above the line between their neighbors are left out.
"""

from __future__ import annotations

import numpy as np

from bertrain.base.errors import UserError
from bertrain.config.settings import Settings

TARGET = 0.72
LAYERS, WIDTH = 24, 1024  # BERT-Large
POINTS = {
    448: 2_414_421, 4608: 2_798_080, 6144: 3_319_125, 6912: 3_601_920, 12288: 4_465_067, 13056: 4_645_333,
    16384: 5_505_422,
}  # fmt: skip
"""Mean samples to the target, by global batch size in sequences; smaller batches need as many as the smallest here."""
SMALLEST, LARGEST = 256, max(POINTS)  # batches that MLPerf has trained


def samples_to_target(batch: float, target: float = TARGET) -> float:
    """Samples that training at this global batch size needs; refuses a batch or a target without points."""
    if target != TARGET or not has_points(batch):
        raise UserError(
            "no-convergence-points",
            f"MLPerf's convergence points are for --target {TARGET:g} and global batches of {SMALLEST:,} to "
            f"{LARGEST:,} sequences, not for {target:g} at {batch:,.0f}; leave --target out to plan the recipe's own "
            "steps",
        )
    return float(np.interp(batch, list(POINTS), list(POINTS.values())))


def refuse_other_model(settings: Settings) -> None:
    """Refuse a target for a model or an optimizer that MLPerf has not trained."""
    if not is_mlperfs(settings):
        model = settings.model
        raise UserError(
            "no-convergence-points",
            f"MLPerf's convergence points are of BERT-Large ({LAYERS} layers of {WIDTH}) with lamb, not of "
            f"{model.num_layers} layers of {model.hidden_size} with {settings.optimizer.name}; leave --target out to "
            "plan the recipe's own steps",
        )


def is_mlperfs(settings: Settings) -> bool:
    """Whether the points are of this model and optimizer."""
    model = settings.model
    is_large = (model.family, model.num_layers, model.hidden_size) == ("bert", LAYERS, WIDTH)
    return is_large and settings.optimizer.name == "lamb"


def has_points(batch: float) -> bool:
    """Whether MLPerf has trained at smaller and larger batches."""
    return SMALLEST <= batch <= LARGEST


def mlperf_interval(batch: float) -> int:
    """Samples between two evaluations by MLPerf's rule: 0.05 (230.23 batch + 3,000,000), down to a whole 25,000."""
    return int((23023 * batch + 300_000_000) // 2000) // 25_000 * 25_000  # no digit is lost of a whole batch
