"""Samples that MLPerf's BERT needs to reach its target, from the reference convergence points (RCP) of MLPerf.

They are of training from MLPerf's initial checkpoint to 0.720 masked-word accuracy with LAMB, by global batch size:
rcps_bert.json in mlcommons/logging, rules 4.1 to 5.1. Between points: straight lines over the logarithm of the batch.
"""

from __future__ import annotations

import numpy as np

from bertrain.base.errors import UserError

TARGET = 0.72
POINTS = {
    256: 2_549_220, 448: 2_414_421, 1536: 2_776_278, 3072: 2_764_499, 4096: 2_843_989, 4608: 2_798_080,
    6144: 3_319_125, 6912: 3_601_920, 8192: 4_186_112, 8704: 4_273_707, 12288: 4_465_067, 13056: 4_645_333,
    16384: 5_505_422,
}  # fmt: skip
"""Mean samples to the target, by global batch size in sequences."""


def samples_to_target(batch: float, target: float = TARGET) -> float:
    """Samples that training at this global batch size needs; refuses a batch or a target without points."""
    low, high = min(POINTS), max(POINTS)
    if target != TARGET or not low <= batch <= high:
        raise UserError(
            "no-convergence-points",
            f"MLPerf's convergence points are for --target {TARGET:g} and global batches of {low:,} to {high:,} "
            f"sequences, not for {target:g} at {batch:,.0f}; leave --target out to plan the recipe's own steps",
        )
    return float(np.interp(np.log(batch), np.log(list(POINTS)), list(POINTS.values())))


def evaluation_interval(batch: float) -> int:
    """Samples between two evaluations by MLPerf's rule."""
    return int(0.05 * (230.23 * batch + 3_000_000) / 25_000) * 25_000
