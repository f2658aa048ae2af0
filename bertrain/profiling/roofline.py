"""The roofline of a step: the operations and bytes of each part of the model, and its measured time.

A part's floor is the larger of its operations over the speed of a large matrix product and its bytes over that of a
copy, both measured on the same device in the same run; planning/costs.py counts both. The share of the floor says how
much faster a part could become without changing what it computes. Parts without any cost (casts, sums) are overhead.

Letters as in bert.py: T tokens of a step, P predictions, S sequences, E hidden size, F intermediate size, V vocabulary.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from bertrain.config.settings import ModelSettings
from bertrain.data.feed.loader import Step
from bertrain.planning import costs
from bertrain.planning.speed import Ceilings
from bertrain.profiling.trace import Launch

SUMS, CASTS, DATA, EXCHANGE, OTHER = "sums over rows", "casts and copies", "data to the device", "all-reduce", "other"
IDLE = "idle between launches"

KERNELS = {
    costs.ATTENTION: ("_plan_kernel", "_attention_", "_backward_query", "_backward_key", "_rotate_"),
    costs.NORM: ("_norm_", "_prenorm_"),
    costs.GELU: ("_gelu_", "_geglu_"),
    costs.EMBEDDINGS: ("_embed_", "_position_kernel"),
    costs.HEADS: ("_rows_kernel", "_cross_entropy"),
    costs.OPTIMIZER: ("_lamb_",),
    SUMS: ("_column_sum",),
    CASTS: ("_transpose_kernel", "_cast_", "_collect_kernel"),
}
"""The kernels of bertrain/kernels by part: prefixes of their names."""
REGION_PARTS = {"optimizer": costs.OPTIMIZER, "all-reduce": EXCHANGE, "data": DATA}
PRODUCTS = {"mm", "addmm", "_scaled_mm", "linear", "_weight_gradient"}
OPERATORS = {
    costs.ATTENTION: ("bmm", "baddbmm", "_softmax", "_softmax_backward_data", "index_select"),
    costs.HEADS: ("_log_softmax", "_log_softmax_backward_data", "nll_loss_forward"),
}


@dataclass(frozen=True)
class StepSize(costs.WorkSize):
    """The size of a step on one device: the mean over some steps."""

    rows: frozenset[int] = frozenset()  # tokens of a bin, for each shape that occurred
    head_rows: frozenset[int] = frozenset()  # predictions and sequences of a bin, likewise

    @staticmethod
    def of(steps: Sequence[Step]) -> StepSize:
        """The mean size of the bins that this rank computed in these steps."""
        bins = [batch for step in steps for batch in step.bins]
        count = len(steps)
        return StepSize(
            tokens=sum(len(batch.input_ids) for batch in bins) / count,
            pairs=sum(length**2 for batch in bins for length in batch.sequence_lengths) / count,
            predictions=sum(len(batch.mlm_labels) for batch in bins) / count,
            sequences=sum(len(batch.nsp_labels) for batch in bins) / count,
            rows=frozenset(len(batch.input_ids) for batch in bins),
            head_rows=frozenset(len(labels) for batch in bins for labels in (batch.mlm_labels, batch.nsp_labels)),
        )


def part_of(launch: Launch, model: ModelSettings, size: StepSize) -> str:
    """The part of the model that a launch belongs to: by the name of our kernels, else by operator and sizes."""
    for part, prefixes in KERNELS.items():
        if launch.name.startswith(prefixes):
            return part
    if launch.region in REGION_PARTS:
        return REGION_PARTS[launch.region]
    operator = launch.operator.removeprefix("aten::")
    if "embedding" in operator.lower():
        return costs.EMBEDDINGS
    if operator in PRODUCTS:
        return _part_of_product(operator, launch.sizes, model, size)
    by_name = next((part for part, names in OPERATORS.items() if operator in names), None)
    return by_name or _part_by_size(launch.sizes, model, size)


def _part_of_product(operator: str, sizes: tuple[tuple[int, ...], ...], model: ModelSettings, size: StepSize) -> str:
    """By the weight matrix, for any of its three products; the two feed-forward matrices look alike."""
    left, right, *_ = (*sizes[operator == "addmm" :], (), ())  # whose first input is the bias
    if len(left) != 2 or len(right) != 2:
        return OTHER
    sides, width = Counter((*left, right[1])), model.hidden_size
    for part, matrix in (
        (costs.QKV, (width, 3 * width)),
        (costs.FEED_FORWARD, (width, model.intermediate_size)),
        (costs.FEED_FORWARD, (width, 2 * model.intermediate_size)),  # with a gate
        (costs.HEADS, (width, model.padded_vocab_size)),
        (costs.ATTENTION_OUT, (width, width)),
    ):
        rows = sides - Counter(matrix)
        if rows.total() == 1:
            of_heads = part == costs.ATTENTION_OUT and next(iter(rows)) in size.head_rows
            return costs.HEADS if of_heads else part
    return costs.HEADS if 2 in sides else OTHER  # the two classes of next-sentence prediction


def _part_by_size(sizes: tuple[tuple[int, ...], ...], model: ModelSettings, size: StepSize) -> str:
    """For operators other than products: by the largest input."""
    largest = max(sizes, key=math.prod, default=())
    width, elements = model.hidden_size, math.prod(largest)
    if len(largest) >= 4 or (len(largest) == 3 and largest[-1] != width):
        return costs.ATTENTION
    if len(largest) == 2:
        rows, last = largest
        if last == model.padded_vocab_size or rows in size.head_rows:
            return costs.HEADS
        if rows == model.padded_vocab_size:
            return costs.EMBEDDINGS
        if (rows, last) in ((3 * width, width), (width, width), (model.intermediate_size, width)):
            return CASTS  # of weights
        if last == model.intermediate_size:
            return CASTS if rows == width else costs.GELU
        return {width: costs.NORM, 3 * width: costs.ATTENTION}.get(last, OTHER)
    if len(largest) == 1 and elements >= 1024:  # dropout masks, and their random bits, a fourth as many
        of_rows = {rows * width // part for rows in size.rows for part in (1, 4)}
        return costs.NORM if elements in of_rows else costs.ATTENTION
    return OTHER


# --- the table ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One part of a step."""

    part: str
    gflop: float
    megabytes: float
    floor_ms: float
    bound_by: str  # products or memory, whichever sets the floor; empty without a floor
    measured_ms: float
    share_of_floor: float | None  # the floor over the measured time; None without a floor
    share_of_step: float


def roofline(required: dict[str, costs.Cost], measured_ms: dict[str, float], ceilings: Ceilings) -> list[Row]:
    """The parts of a step, the slowest first. `measured_ms` is of one step."""
    whole = max(sum(measured_ms.values()), 1e-12)
    rows = []
    for part in dict.fromkeys([*required, *measured_ms]):
        (operations, moved), taken = required.get(part, np.zeros(2)).tolist(), measured_ms.get(part, 0.0)
        of_products, of_memory = operations / ceilings.operations_per_s, moved / ceilings.bytes_per_s
        floor = 1e3 * max(of_products, of_memory)
        rows.append(
            Row(
                part=part,
                gflop=operations / 1e9,
                megabytes=moved / 1e6,
                floor_ms=floor,
                bound_by=("products" if of_products >= of_memory else "memory") if floor else "",
                measured_ms=taken,
                share_of_floor=floor / taken if floor and taken else None,
                share_of_step=taken / whole,
            )
        )
    return sorted(rows, key=lambda row: -row.measured_ms)


def measured_by_part(launches: Iterable[Launch], model: ModelSettings, size: StepSize, steps: int) -> dict[str, float]:
    """Milliseconds per step of each part, from the launches of `steps` steps."""
    totals: dict[str, float] = defaultdict(float)
    for launch in launches:
        totals[part_of(launch, model, size)] += launch.duration_ns / 1e6 / steps
    return dict(totals)


def idle_ms(step_ms: float, launches: Iterable[Launch], steps: int) -> float:
    """Milliseconds per step in which no stream of the device was busy."""
    busy_ns, reached = 0, 0
    for launch in sorted(launches, key=lambda launch: launch.start_ns):
        busy_ns += max(0, launch.end_ns - max(reached, launch.start_ns))
        reached = max(reached, launch.end_ns)
    return max(0.0, step_ms - busy_ns / 1e6 / steps)


def table_text(rows: Iterable[Row]) -> str:
    lines = [f"{'part':<30}{'GFLOP':>11}{'MB':>10}{'floor ms':>10}{'ms':>10}{'of floor':>10}{'of step':>9}  set by"]
    for row in rows:
        share = "-" if row.share_of_floor is None else f"{row.share_of_floor:.0%}"
        times = f"{row.floor_ms:>10.3f}{row.measured_ms:>10.3f}{share:>10}{row.share_of_step:>9.1%}"
        lines.append(f"{row.part:<30}{row.gflop:>11,.4g}{row.megabytes:>10,.4g}{times}  {row.bound_by}")
    return "\n".join(lines)
