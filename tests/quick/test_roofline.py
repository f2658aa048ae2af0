"""The roofline: operations as others count them, launches of an H200 put into parts, floors by hand."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bertrain import kernels
from bertrain.config.model_size import multiply_adds
from bertrain.data.feed.loader import Loader
from bertrain.model.families import new_model
from bertrain.model.heads import pretraining_sums
from bertrain.planning import costs
from bertrain.planning.costs import linear, required_costs
from bertrain.planning.speed import Ceilings, measure_ceilings
from bertrain.profiling import roofline, trace
from bertrain.profiling.roofline import StepSize, part_of
from bertrain.profiling.synthetic import write_synthetic
from bertrain.profiling.trace import Launch, launches_of
from tests import helpers
from tests.quick.test_trace import recorded

RECORDED = helpers.tiny_settings(
    model__hidden_size=128, model__intermediate_size=512, model__pad_vocab_to=64, batch__sequences=8
)  # fmt: skip
RECORDED_SIZE = StepSize(448, 0.0, 76, 23, frozenset({256, 192}), frozenset({43, 33, 13, 10}))


@pytest.mark.parametrize("family", ["bert", "modern"])
def test_operations_are_those_that_balance_counts(family: str) -> None:
    """`data/balance.py` counts multiply-adds of a forward pass, next sentence left out."""
    window = {"model__local_window": 8} if family == "modern" else {}
    settings = helpers.tiny_settings(model__nsp=False, model__family=family, **window)
    size = StepSize(256, 5000.0, 30, 8, frozenset({256}), frozenset({30, 8}))
    work = required_costs(settings, size, is_fused=False)
    counted = multiply_adds(settings.model, *(np.array(count) for count in (256, 5000, 30)))
    assert sum(part[0] for part in work.values()) == 6 * int(counted)


@pytest.mark.parametrize("family", ["bert", "modern"])
def test_operations_are_those_that_torch_counts(tmp_path: object, family: str) -> None:
    """torch's own counter watches a forward and backward pass of equally long sequences."""
    settings = helpers.tiny_settings(
        model__family=family, model__hidden_dropout=0, model__attention_dropout=0, model__vocab_size=200
    )
    step = Loader(write_synthetic(tmp_path / "data", settings), settings).step(0, 0)  # type: ignore[operator]
    model = new_model(settings.model).train()
    with FlopCounterMode(display=False) as counter:
        for batch in step.bins:
            outputs = model(batch)
            sums = pretraining_sums(outputs.mlm_logits, outputs.nsp_logits, batch)
            (sums.mlm_loss + sums.sequence_loss).backward()
    size = StepSize.of([step])
    ours = sum(part[0] for part in required_costs(settings, size, is_fused=False).values())
    two_answers = 6 * size.sequences * settings.model.hidden_size * 2 if settings.model.nsp else 0  # left out
    assert ours + two_answers == pytest.approx(counter.get_total_flops(), rel=1e-9)


def test_a_product_reads_and_writes_each_operand_once() -> None:
    work = linear(10, 3, 7, (2, 2))
    forward, of_input, of_weight = (30 + 21) * 2 + 70 * 2, (70 + 21) * 2 + 30 * 2, (70 + 30) * 2 + 21 * 4
    assert work.tolist() == [6 * 10 * 3 * 7, forward + of_input + of_weight]


def test_the_fused_path_computes_fewer_rows_of_the_last_layer() -> None:
    size = StepSize(256, 5000.0, 30, 8, frozenset({256}), frozenset({30, 8}))
    plain, fused = (required_costs(helpers.tiny_settings(), size, is_fused=is_fused) for is_fused in (False, True))
    layers = 2
    share = ((layers - 1) * 256 + 38) / (layers * 256)
    assert fused[costs.FEED_FORWARD][0] == pytest.approx(share * plain[costs.FEED_FORWARD][0])
    assert fused[costs.QKV].tolist() == plain[costs.QKV].tolist()


@pytest.mark.parametrize("name", ["bf16-eager", "fp8-eager"])
def test_launches_of_an_h200_have_their_part(name: str) -> None:
    """Two steps of two bins, two layers each: as many products of each matrix as there must be."""
    model = RECORDED.model
    launches = launches_of(recorded(name))
    parts = Counter(part_of(one, model, RECORDED_SIZE) for one in launches)
    products = Counter(
        part_of(one, model, RECORDED_SIZE)
        for one in launches
        if one.operator.removeprefix("aten::") in roofline.PRODUCTS and not one.name.startswith("Memset")
    )
    passes = 2 * 2 * 2  # steps, bins, layers
    assert products[costs.QKV] == 3 * passes
    assert products[costs.FEED_FORWARD] == 2 * 3 * passes
    assert products[costs.ATTENTION_OUT] + products[costs.HEADS] >= 3 * passes + 6 * 4
    assert parts[costs.ATTENTION] == 3 * passes + 2 * 2 + 2 * 2  # forward, two backward; a plan for each bin
    assert parts[costs.GELU] == 2 * passes
    in_other = sum(one.duration_ns for one in launches if part_of(one, model, RECORDED_SIZE) == roofline.OTHER)
    assert in_other < 0.3 * sum(one.duration_ns for one in launches), "tiny kernels of scalars, of a tiny model"


def test_every_kernel_of_ours_has_a_part() -> None:
    """Kernels are known by their names here: one that is renamed would be counted as something else, silently."""
    sources = [path.read_text() for path in Path(kernels.__file__).parent.glob("*.py")]
    names = {name for source in sources for name in re.findall(r"^def (_\w+_kernel)\(", source, re.MULTILINE)}
    assert len(names) > 10
    known = tuple(prefix for prefixes in roofline.KERNELS.values() for prefix in prefixes)
    assert {name for name in names if not name.startswith(known)} == set()
    bounds = {name for name in trace.FIRST_OF_FORWARD | trace.LAST_OF_FORWARD if name.endswith("_kernel")}
    assert bounds <= names


def test_the_table_by_hand() -> None:
    ceilings = Ceilings(operations_per_s=1e12, bytes_per_s=1e9, product="")
    work = {"a": np.array([2e9, 1e6]), "b": np.array([0.0, 4e6]), "c": np.array([1e6, 0.0])}
    rows = {row.part: row for row in roofline.roofline(work, {"a": 4.0, "b": 5.0, "waste": 1.0}, ceilings)}
    assert list(rows) == ["b", "a", "waste", "c"], "what takes longest first"
    assert (rows["a"].floor_ms, rows["a"].bound_by, rows["a"].share_of_floor) == (2.0, "products", 0.5)
    assert (rows["b"].floor_ms, rows["b"].bound_by, rows["b"].share_of_floor) == (4.0, "memory", 0.8)
    assert (rows["waste"].bound_by, rows["waste"].share_of_floor) == ("", None)
    assert rows["c"].share_of_floor is None, "nothing was measured of it"
    assert [row.share_of_step for row in rows.values()] == [0.5, 0.4, 0.1, 0.0]
    assert "80%" in roofline.table_text(rows.values())


def test_idle_is_what_no_stream_was_busy_with() -> None:
    def launch(start_ms: int, duration_ms: int, stream: int) -> Launch:
        return Launch("", "kernel", start_ms * 10**6, duration_ms * 10**6, stream, (), (), "", "", ())

    two_steps = [launch(100, 10, 7), launch(105, 10, 9), launch(106, 2, 7), launch(130, 5, 7)]
    assert roofline.idle_ms(12.0, two_steps, 2) == pytest.approx(12 - (15 + 5) / 2)
    assert roofline.idle_ms(9.0, two_steps, 2) == 0


def test_ceilings_are_measured() -> None:
    ceilings = measure_ceilings(torch.device("cpu"), "fp32", seconds=0.01)
    assert 1e8 < ceilings.operations_per_s < 1e15
    assert 1e7 < ceilings.bytes_per_s < 1e14
