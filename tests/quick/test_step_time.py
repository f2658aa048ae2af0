"""The plan's model: collectives by hand, properties of step times, convergence points, the table of devices."""

from __future__ import annotations

import csv
import gzip
import importlib
import json
import math
import statistics
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bertrain.cli.plan import _fit as fit
from bertrain.config.model_size import count_parameters
from bertrain.config.resolve import resolve
from bertrain.planning import collectives, convergence
from bertrain.planning.collectives import Group, all_reduce, finish_exchange, gather
from bertrain.planning.devices import LINK_SHARE, Network, find_gpu, find_network, gpu_like, gpu_names
from bertrain.planning.plan import (
    Wish,
    best_batching,
    deal_steps,
    evaluation_seconds,
    fastest_for,
    fewest_gpus,
    full_bins,
    leave_idle,
    lengths_of,
    make_plan,
    table_text,
)
from bertrain.planning.prediction import predict_run
from bertrain.planning.step_time import (
    FP8_LAUNCHES,
    HOST_LAUNCHES,
    HOST_S,
    LAUNCHES,
    Cluster,
    Design,
    Jitter,
    calibrated,
    compute_seconds,
    exchange_seconds,
    optimizer_seconds,
    step_time,
)
from tests import helpers

ROOT = Path(__file__).parents[2]
HISTOGRAM = ROOT / "benchmarks" / "wikipedia-512.csv"
NETWORK = Network("by hand", 100e9 / LINK_SHARE, 1e-6, 10e9 / LINK_SHARE, 10e-6)  # 100 and 10 GB/s reached
SETTINGS = resolve("mlperf-nvidia-1x8x48-packed", [])


def cluster(count: int, gpu: str = "h200", network: str = "nvlink+ib-ndr") -> Cluster:
    return Cluster(find_gpu(gpu), find_network(network, find_gpu(gpu), 8), count)


def wish(**changes: object) -> Wish:
    return replace(Wish(SETTINGS, lengths_of(HISTOGRAM, 512), cluster(1)), **changes)  # type: ignore[arg-type]


# --- collectives, by hand -----------------------------------------------------------------------------


def test_a_ring_sends_every_byte_twice_around() -> None:
    """4 devices of one machine: 2 x 3/4 of 1 GB at 100 GB/s, and 6 hops of 1 us."""
    assert collectives.ring_all_reduce(1e9, Group(1, 4, NETWORK)) == pytest.approx(15e-3 + 6e-6)


def test_a_ring_over_machines_is_as_fast_as_the_links_between_them() -> None:
    """2 x 4 devices: 2 x 7/8 of 1 GB at 10 GB/s; each way 5 hops inside and 2 between."""
    assert collectives.ring_all_reduce(1e9, Group(2, 4, NETWORK)) == pytest.approx(0.175 + 2 * (5e-6 + 20e-6))


def test_a_tree_has_as_many_hops_as_its_depth() -> None:
    """8 machines of 4: up and down, 1 GB each, 3 hops inside, 3 between."""
    assert collectives.tree_all_reduce(1e9, Group(8, 4, NETWORK)) == pytest.approx(2 * (0.1 + 3e-6 + 30e-6))


def test_a_hierarchy_sends_a_part_of_each_device_between_machines() -> None:
    """2 machines of 4: twice 3/4 GB inside at 100 GB/s; 1/4 GB between, once, at a device's 2.5 GB/s."""
    inside = 2 * (7.5e-3 + 3e-6)
    assert collectives.hierarchical_all_reduce(1e9, Group(2, 4, NETWORK)) == pytest.approx(inside + 0.1 + 40e-6)


def test_small_messages_go_by_tree_and_large_ones_by_the_fastest() -> None:
    group = Group(64, 8, NETWORK)
    assert all_reduce(0, group) == pytest.approx(collectives.tree_all_reduce(0, group))
    for size in (0.0, 1e6, 1e9):
        ways = (collectives.ring_all_reduce, collectives.tree_all_reduce, collectives.hierarchical_all_reduce)
        assert all_reduce(size, group) == min(way(size, group) for way in ways)


def test_scattering_and_gathering_is_an_all_reduce() -> None:
    """The bytes are conserved: a ring is a reduce-scatter and an all-gather."""
    group = Group(4, 8, NETWORK)
    assert 2 * gather(1e9, group) == pytest.approx(collectives.ring_all_reduce(1e9, group))


def test_one_device_exchanges_nothing() -> None:
    assert all_reduce(1e9, Group(1, 1, NETWORK)) == gather(1e9, Group(1, 1, NETWORK)) == 0


def test_buckets_wait_for_their_gradients_and_for_each_other() -> None:
    assert finish_exchange([1, 2, 3], 0.5) == 3.5
    assert finish_exchange([1, 2, 3], 2) == 7
    assert finish_exchange([3, 3, 3], 2) == 9


# --- a step -------------------------------------------------------------------------------------------


def test_more_gpus_never_slow_the_computation_of_a_rank() -> None:
    lengths, design = lengths_of(HISTOGRAM, 512), Design.of(SETTINGS)
    busiest = []
    for ranks in (1, 2, 4, 8, 16):
        loads, _ = deal_steps(SETTINGS, lengths, ranks)
        busiest.append(
            max(compute_seconds(SETTINGS, load, find_gpu("h200"), design).sum(axis=1).max() for load in loads)
        )
    assert busiest == sorted(busiest, reverse=True)


def test_dealing_conserves_the_work() -> None:
    """However many ranks there are, they compute the same bins."""
    lengths = lengths_of(HISTOGRAM, 512)
    for name in ("bins", "tokens", "pairs", "predictions"):
        sums = {getattr(deal_steps(SETTINGS, lengths, ranks, 1)[0][0], name).sum() for ranks in (1, 8, 64)}
        assert len(sums) == 1


def test_compute_time_is_that_of_its_parts() -> None:
    """Linear in the load: two bins take twice one, and a rank without bins takes nothing."""
    gpu, design = find_gpu("h100"), Design.of(SETTINGS)
    one, two = (
        compute_seconds(SETTINGS, full_bins(SETTINGS, 24576 * bins, bins, np.array([256])), gpu, design)
        for bins in (1, 2)
    )
    assert two == pytest.approx(2 * one)
    assert not compute_seconds(SETTINGS, full_bins(SETTINGS, 0, 0, np.array([256])), gpu, design).any()


def test_apex_computes_a_head_on_one_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 24 layers with 16 heads; benchmarks/plan.py predicts NVIDIA's runs with it."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    benchmark = importlib.import_module("plan")
    gpu, one = find_gpu("a100"), np.ones(1)
    row = {"precision": "fp16", "gpu": "a100", "layout": "packed"}
    seconds = benchmark.attention_of(row, gpu, SETTINGS.model)
    a_head, whole = benchmark.APEX_HEAD_S, np.array([512.0**2])
    assert seconds(one, 1000 * whole)[0] == pytest.approx(24 * 16 * 1000 * a_head / gpu.processors)
    assert seconds(one, whole)[0] == pytest.approx(24 * a_head), "all heads at once, the other processors idle"
    assert seconds(2 * one, 2 * whole)[0] == pytest.approx(2 * 24 * a_head)
    assert benchmark.attention_of(row | {"precision": "fp8"}, gpu, SETTINGS.model) is None


def test_another_kernel_changes_attention_alone() -> None:
    load = full_bins(SETTINGS, 1024, 1, np.array([512]))
    ours, theirs = (
        compute_seconds(SETTINGS, load, find_gpu("h100"), Design(attention=kernel))[0]
        for kernel in (None, lambda bins, pairs: 3 * bins + pairs)
    )
    assert (ours == theirs).tolist() == [True, False, True, True]
    assert theirs[1] == pytest.approx(3 + 1024 * 512)


def test_copies_take_the_time_of_their_bytes() -> None:
    one, parameters = cluster(8), count_parameters(SETTINGS.model)[0]
    copies = optimizer_seconds(SETTINGS, one, Design(copied_bytes=8)) - optimizer_seconds(SETTINGS, one, Design())
    assert copies == pytest.approx(8 * parameters / (0.8 * 4.8e12))


def test_sixteen_bits_halve_the_exchange_and_overlap_hides_it() -> None:
    parameters, _ = count_parameters(SETTINGS.model)
    wide, narrow = (Design(gradient_bytes=size, overlaps=False) for size in (4, 2))
    there = cluster(64)
    scalars = all_reduce(0, there.group)
    hops = all_reduce(1, there.group)
    whole, half = (exchange_seconds(parameters, there, design, 0.05) - scalars - hops for design in (wide, narrow))
    assert half == pytest.approx(whole / 2, rel=0.01)
    hidden = replace(wide, overlaps=True, buckets=50)
    assert exchange_seconds(parameters, there, hidden, 10.0) < 0.05 * exchange_seconds(parameters, there, wide, 10.0)


def test_the_slowest_rank_is_drawn_by_seed() -> None:
    loads, _ = deal_steps(SETTINGS, lengths_of(HISTOGRAM, 512), 8)
    design = Design.of(SETTINGS)

    def took(jitter: Jitter, seed: int) -> float:
        return step_time(SETTINGS, loads, cluster(8), design, jitter=jitter, seed=seed).seconds

    assert took(0.02, 1) == took(0.02, 1) != took(0.02, 2)
    assert took(0, 1) == took(0, 2) < took(0.02, 1)
    assert took((1.0, 1.0), 1) == took(0, 1)


def test_the_slowest_rank_is_drawn_from_measured_times() -> None:
    """One step in ten takes twice as long: of 8 ranks one is late in 57 % of the steps."""
    load, design = full_bins(SETTINGS, 24576, 1, np.array([512])), Design.of(SETTINGS)
    eight = replace(load, **{name: np.repeat(value, 8) for name, value in vars(load).items()})
    even, late = (step_time(SETTINGS, [eight], cluster(8), design, jitter=jitter) for jitter in (0, (2.0, *[1.0] * 9)))
    computing = even.products + even.attention + even.memory + even.launches
    assert even.stragglers == pytest.approx(0, abs=1e-12)
    assert late.stragglers == pytest.approx((1 - 0.9**8) * computing, rel=0.05)


def test_a_calibrated_gpu_takes_the_measured_time() -> None:
    loads, _ = deal_steps(SETTINGS, lengths_of(HISTOGRAM, 512), 8)
    design = Design.of(SETTINGS)
    gpu = calibrated(SETTINGS, loads, cluster(8), design, 0.123, jitter=0)
    took = step_time(SETTINGS, loads, replace(cluster(8), gpu=gpu), design, jitter=0)
    assert took.seconds == pytest.approx(0.123)
    assert sum(took.parts.values()) == took.seconds


def test_the_table_is_near_a_measured_step() -> None:
    """95.5 ms for BERT-Large in bf16 on one H200, 24,576 tokens: benchmarks/results/gpu_pretrain.json."""
    settings = replace(SETTINGS, train=replace(SETTINGS.train, precision="bf16"))
    load = full_bins(settings, 24576, 1, lengths_of(HISTOGRAM, 512))
    found = step_time(settings, [load], cluster(1), Design.of(settings), jitter=0)
    assert found.seconds == pytest.approx(0.0955, rel=0.03)
    assert found.exchange == 0


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_recomputed_activations_take_time(precision: str) -> None:
    """As much longer as measured on one H200; nothing of the model was fitted to these steps."""
    raw = json.loads((ROOT / "benchmarks" / "results" / "gpu_memory.json").read_text())
    rows = [row for row in raw if row["precision"] == precision]
    assert [row["activation_checkpointing"] for row in rows] == ["none", "selective", "full"]
    predicted, evaluated = [], set()
    for row in rows:
        changed = {name: row[name] for name in ("precision", "activation_checkpointing")}
        settings = replace(SETTINGS, train=replace(SETTINGS.train, **changed))
        load = full_bins(settings, 24576, 1, lengths_of(HISTOGRAM, 512))
        predicted.append(step_time(settings, [load], cluster(1), Design.of(settings), jitter=0).seconds)
        evaluated.add(evaluation_seconds(settings, cluster(1), Design.of(settings), 100))
    measured = [row["at_24576"]["ms_per_step"] for row in rows]
    for again in (1, 2):
        assert predicted[again] / predicted[0] == pytest.approx(measured[again] / measured[0], rel=0.015)
    assert len(evaluated) == 1, "an evaluation recomputes nothing"


def test_the_last_layer_is_computed_whole_without_our_kernels() -> None:
    """As bf16 on a CPU without AMX."""
    settings = replace(SETTINGS, train=replace(SETTINGS.train, precision="bf16"))
    load, gpu = full_bins(settings, 24576, 1, np.array([512])), find_gpu("h200")
    fused, plain = (compute_seconds(settings, load, gpu, Design.of(settings, one)).sum() for one in (None, "plain"))
    assert 1 + 0.5 / 24 < plain / fused < 1 + 1 / 23


# --- convergence points -------------------------------------------------------------------------------


def test_convergence_points_lie_on_straight_lines() -> None:
    assert convergence.samples_to_target(448) == convergence.samples_to_target(256) == 2_414_421
    assert convergence.samples_to_target(16384) == 5_505_422
    assert convergence.samples_to_target((448 + 4608) / 2) == pytest.approx((2_414_421 + 2_798_080) / 2)


@pytest.mark.parametrize("ruleset", ["4.1.0", "5.0.0", "5.1.0"])
def test_mlperfs_own_checker_expects_as_many_samples(ruleset: str) -> None:
    checker = pytest.importorskip("mlperf_logging.rcp_checker.rcp_checker").RCP_Checker(
        "training", ruleset, "bert", False
    )
    theirs = {point["BS"]: round(point["RCP Mean"]) for point in checker.pruned_rcp_data.values()}
    assert theirs == convergence.POINTS
    for batch in (768, 1536, 3072, 5000, 8192, 13888):
        near = (find(batch, "pruned_rcps") for find in (checker._find_top_min_rcp, checker._find_bottom_max_rcp))
        _, expected = checker._create_interp_rcp(batch, *near)
        assert convergence.samples_to_target(batch) == pytest.approx(expected["RCP Mean"])


@pytest.mark.parametrize("batch", [255, 16385])
def test_no_points_outside_the_reference(batch: int) -> None:
    with helpers.refused("no-convergence-points", "256", "16,384", f"{batch:,}"):
        convergence.samples_to_target(batch)
    with helpers.refused("no-convergence-points", "0.8"):
        convergence.samples_to_target(1024, 0.8)


def test_evaluations_follow_the_rule_of_mlperf() -> None:
    values = {768: 150_000, 3072: 175_000, 4608: 200_000, 8192: 225_000, 13888: 300_000, 16384: 325_000}
    assert {batch: convergence.mlperf_interval(batch) for batch in values} == values


# --- devices ------------------------------------------------------------------------------------------


def test_every_gpu_of_the_table_can_be_planned_for() -> None:
    for name in gpu_names():
        settings = replace(SETTINGS, train=replace(SETTINGS.train, precision="fp32"))
        assert step_time(settings, [full_bins(settings, 512, 1, np.array([512]))], cluster(1, name), Design(), jitter=0)


def test_names_of_cuda_are_found_in_the_table() -> None:
    named = {"NVIDIA H100 80GB HBM3": "h100", "NVIDIA A100-SXM4-80GB": "a100", "NVIDIA H200": "h200"}
    named |= {"NVIDIA A100-SXM4-40GB": "a100-40", "NVIDIA GeForce RTX 4090": "rtx4090"}
    named |= {"Tesla V100-SXM2-32GB": "v100", "NVIDIA H100 PCIe": "h100-pcie", "NVIDIA L40S": "l40s"}
    named |= {"Tesla T4": "t4", "NVIDIA A10": "a10", "NVIDIA L4": "l4", "NVIDIA GeForce RTX 5090": "rtx5090"}
    assert {device: found.name for device in named if (found := gpu_like(device))} == named


@pytest.mark.parametrize(
    "device",
    ["NVIDIA T400 4GB", "NVIDIA A10G", "NVIDIA GeForce RTX 3090 Ti", "NVIDIA A100 80GB PCIe", "NVIDIA A100-PCIE-40GB",
     "NVIDIA H100 NVL", "NVIDIA H200 NVL",
     "NVIDIA GeForce RTX 4090 Laptop GPU", "Tesla V100-SXM2-16GB", "NVIDIA A100-SXM4-80GB MIG 3g.40gb"],
)  # fmt: skip
def test_a_card_that_is_not_in_the_table_is_no_other_card(device: str) -> None:
    assert gpu_like(device) is None


def test_networks_by_name_and_by_file(tmp_path: Path) -> None:
    gpu = find_gpu("a100")
    assert find_network("nvlink+4xib-hdr", gpu, 8).between == 100e9
    assert find_network("nvlink+ib-hdr", gpu, 8).between == 200e9
    assert find_network("nvlink+ethernet-10", gpu, 8).name == "nvlink+8xethernet-10"
    defaults = {"a100": "nvlink", "l40s": "pcie", "rtx4090": "pcie", "h100-pcie": "pcie"}
    for name, inside in defaults.items():
        card = find_gpu(name)
        found = find_network("", card, 4)
        assert (found.name, found.inside) == (f"{inside}+4xib-ndr", card.link)
    file = tmp_path / "own.toml"
    file.write_text("inside_gb_per_s = 300\ninside_hop_us = 3\nbetween_gb_per_s = 40\nbetween_hop_us = 10\n")
    found = find_network(str(file), gpu, 8)
    speeds = found.inside, found.inside_hop_s, found.between, found.between_hop_s
    assert speeds == pytest.approx((300e9, 3e-6, 40e9, 1e-5))
    whole = file.read_text()
    for wrong, code in {
        "inside_gb_per_s = 300\n": "bad-network-file",
        whole.replace("300", "nan"): "bad-network-file",
        whole.replace("300", "inf"): "bad-network-file",
        whole.replace("300", "0"): "bad-network-file",
        whole.replace("300", "-300"): "bad-network-file",
        whole + "more = 1\n": "bad-network-file",
        f"inside_gb_per_s = {'[' * 100_000}": "invalid-toml",
    }.items():
        file.write_text(wrong)
        with helpers.refused(code, str(file)):
            find_network(str(file), gpu, 8)
    for wrong in ("carrier-pigeon", "nvlink+ib-xyz", "nvlink+axib-hdr", "nvlink+0xib-hdr"):
        with helpers.refused("unknown-network", wrong):
            find_network(wrong, gpu, 8)


# --- plans --------------------------------------------------------------------------------------------


def test_a_plan_adds_up() -> None:
    plan = make_plan(wish(target=0.72, price=3.0), 8)
    assert plan.gpu_hours == pytest.approx(8 * plan.seconds / 3600)
    assert plan.price == pytest.approx(3 * plan.gpu_hours)
    assert plan.steps * plan.step.seconds < plan.seconds < 1.1 * plan.steps * plan.step.seconds
    assert plan.steps == pytest.approx(convergence.samples_to_target(768) / plan.sequences_per_step, abs=1)


def test_a_run_ends_after_as_many_samples_as_it_may_take() -> None:
    few = replace(SETTINGS, train=replace(SETTINGS.train, max_samples=76_800))
    plan = make_plan(wish(settings=few), 8)
    assert plan.steps == pytest.approx(100, abs=1)
    found = predict_run(few, lengths_of(HISTOGRAM, 512), find_gpu("h200"), 8, 8)
    assert found is not None
    assert found.steps == pytest.approx(100, abs=1)


def test_shorter_examples_make_a_larger_batch() -> None:
    """A step of so many tokens has twice the examples of half the length, and so needs the samples of that batch."""
    short = make_plan(wish(target=0.72, lengths=np.full(4096, 128)), 8)
    batch = SETTINGS.batch.tokens // 128
    assert short.sequences_per_step == batch > 1.9 * SETTINGS.nominal_sequences
    assert short.steps == math.ceil(convergence.samples_to_target(batch) / batch)


def test_no_part_of_a_step_is_minus_zero() -> None:
    """Ranks that are faster than the mean by chance."""
    plan = make_plan(wish(), 1)
    chance = replace(plan, step=replace(plan.step, stragglers=-1e-6))
    assert "-0.00" not in table_text([make_plan(wish(), 8), chance])


def test_the_table_has_the_time_of_the_whole_run() -> None:
    plans = [make_plan(wish(target=0.72), count) for count in (1, 8)]
    heads, *rows = (line.split() for line in table_text(plans).replace(" s", "s").replace(" min", "min").splitlines())
    assert "host" not in heads, "graphs launch the kernels"
    assert "imbalance" not in heads, "all ranks have as much to do"
    for plan, row in zip(plans, rows, strict=True):
        cells = dict(zip(heads, row, strict=True))
        assert (cells["start-up"], cells["evaluation"]) == ("0.6s", f"{plan.evaluation_s:.1f}s")
        whole = plan.start_up_s + plan.evaluation_s + plan.steps * plan.step.seconds
        assert plan.seconds == pytest.approx(whole, rel=0.001)


def test_backwards_questions() -> None:
    fewest = fewest_gpus(wish(target=0.72), 600, 64)
    assert fewest.seconds <= 600 < make_plan(wish(target=0.72), fewest.count // 2).seconds
    cheap = fastest_for(wish(target=0.72, price=3.0), 2.0, 16)
    assert cheap.price <= 2
    with helpers.refused("no-such-plan", "16"):
        fewest_gpus(wish(target=0.72), 1, 16)
    with helpers.refused("no-price"):
        fastest_for(wish(), 2.0, 8)
    now = make_plan(wish(), 64)
    better = best_batching(wish(), 64)
    assert better.sequences_per_s > 2 * now.sequences_per_s
    assert better.idle < 0.1
    assert "64 GPUs" in leave_idle([make_plan(wish(), 8), now])
    assert not leave_idle([better])


def test_backwards_questions_choose_the_token_budget() -> None:
    """The recipe's bins are for 8 GPUs, and no number of them ends in 4 minutes."""
    found = fewest_gpus(wish(target=0.72), 240, 64)
    assert (found.count, make_plan(wish(target=0.72), 16).seconds > 240) == (16, True)
    assert found.batch.token_budget < SETTINGS.batch.token_budget
    assert fastest_for(wish(target=0.72, price=3.0), 100, 16) == replace(found, price=3 * found.gpu_hours)


def test_a_plan_without_data_masks_the_share_of_its_model_family() -> None:
    for recipe, share in (("modernbert-base", 0.3), ("bert-base", 0.15)):
        settings = resolve(recipe, {"data.max_seq_length": "512", "data.max_predictions": "0"})
        fitted, _, _ = fit(settings, find_gpu("h200"), None, None, for_target=False)
        assert fitted.data.max_predictions == math.ceil(share * 512)


def test_a_plan_that_does_not_fit_is_refused() -> None:
    with helpers.refused("out-of-memory", "rtx4090"):
        make_plan(wish(cluster=cluster(1, "rtx4090")), 1)


def test_a_run_is_predicted_before_it_starts() -> None:
    lengths, h200 = lengths_of(HISTOGRAM, 512), find_gpu("h200")
    found = predict_run(SETTINGS, lengths, h200, 8, 8)
    assert found is not None
    assert found.step_s == pytest.approx(make_plan(wish(), 8).step.seconds, rel=0.02)
    assert found.text().startswith("time by `bertrain plan` for 8 h200: 82.")
    assert f"{3680 * found.step_s / 60 + 0.01:.2f} min for 3,680 steps" in found.text()
    nodes = predict_run(resolve("mlperf-nvidia-8x8x36-packed"), lengths, h200, 64, 8)
    assert nodes is not None
    assert "64 h200 in 8 machines over nvlink+8xib-ndr, which is assumed" in nodes.text()


def test_a_run_to_mlperfs_target_ends_there() -> None:
    settings = replace(SETTINGS, evaluate=replace(SETTINGS.evaluate, target_accuracy=0.72))
    found = predict_run(settings, lengths_of(HISTOGRAM, 512), find_gpu("h200"), 8, 8)
    assert found is not None
    assert found.steps == pytest.approx(make_plan(wish(target=0.72), 8).steps, rel=0.01)
    assert "to 0.72" in found.text()


def test_runs_that_plans_do_not_cover_have_no_prediction() -> None:
    lengths, h200 = lengths_of(HISTOGRAM, 512), find_gpu("h200")
    assert predict_run(SETTINGS, lengths, find_gpu("a100"), 8, 8) is None, "an A100 has no FP8"
    for change in ([("train.kernels", "plain")], [("train.kernels", "compiled")]):
        assert predict_run(resolve("mlperf-nvidia-1x8x48-packed", change), lengths, h200, 8, 8) is None
    assert predict_run(resolve("contest-mnli-1x1"), lengths, find_gpu("v100"), 1, 1) is None


@pytest.mark.parametrize(("precision", "tolerance"), [("bf16", 0.05), ("fp16", 0.05), ("fp32", 0.05), ("tf32", 0.2)])
def test_steps_without_our_kernels_take_as_long_as_measured(precision: str, tolerance: float) -> None:
    """BERT-Base with the compiled engine on an H200, 32,768 tokens of full rows."""
    raw = json.loads((ROOT / "benchmarks" / "results" / "gpu_portable.json").read_text())["results"]
    rows = [row for row in raw if (row["precision"], row["rows"], row["model"]) == (precision, "full", "base")]
    assert rows
    for row in rows:
        length = row["length"]
        sizes = {"data.max_seq_length": length, "data.max_predictions": length * 3 // 20, "train.precision": precision}
        settings = resolve("bert-base-phase2", [(name, str(value)) for name, value in sizes.items()])
        settings = replace(settings, model=replace(settings.model, vocab_size=30522))
        load = full_bins(settings, 32768, 1, np.array([length]))
        predicted = step_time(settings, [load], cluster(1), Design.of(settings, "compiled"), jitter=0).seconds
        assert 1e3 * predicted == pytest.approx(row["bertrain"]["ms_per_step"], rel=tolerance)


def test_launches_are_those_of_the_traces() -> None:
    """Idle and launches of BERT-Large's step, by region, in a profile; a kernel's time and FP8's in the smallest."""
    with gzip.open(ROOT / "tests/data/profile-h200/node-cuda0/repeat-1/launches.csv.gz", "rt", newline="") as file:
        rows = list(csv.DictReader(file))
    begins, durations = (np.array([int(row[name]) for row in rows]) for name in ("start_ns", "duration_ns"))
    idle = begins[1:] - begins[:-1] - durations[:-1]
    gpu, steps = find_gpu("h200"), 3
    assert idle.sum() / len(rows) == pytest.approx(1e9 * gpu.launch_s, rel=0.05)
    assert len(rows) == steps * (24 * LAUNCHES[0] + sum(LAUNCHES[1:]))
    assert sum(row["region"] == "optimizer" for row in rows) == steps * LAUNCHES[2]

    def kernels(name: str) -> list[float]:
        trace = json.loads(gzip.decompress((ROOT / f"tests/data/kineto-h200/{name}.json.gz").read_bytes()))
        kinds = ("kernel", "gpu_memcpy", "gpu_memset")
        return [event["dur"] for event in trace["traceEvents"] if event.get("cat") in kinds]

    short = [microseconds for microseconds in kernels("bf16-graph") if microseconds < 10]
    assert statistics.mean(short) == pytest.approx(1e6 * gpu.fill_s, rel=0.1)
    layers_run = 2 * 2 * 2  # steps, bins and layers
    assert len(kernels("fp8-eager")) - len(kernels("bf16-eager")) == pytest.approx(layers_run * FP8_LAUNCHES, abs=4)


def test_small_bins_take_as_long_as_measured() -> None:
    """BERT-Large on an H200, as thousands of GPUs compute it: of a step, launches are a large part."""
    rows = json.loads((ROOT / "benchmarks" / "results" / "small_bins.json").read_text())
    assert {row["token_budget"] for row in rows} == {1024, 4096}
    for row in rows:
        budget = str(row["token_budget"])
        changes = {"batch.sequences": "0", "batch.tokens": budget, "batch.token_budget": budget}
        settings = resolve("bert-large-phase2", list((changes | {"train.precision": row["precision"]}).items()))
        load = full_bins(settings, row["token_budget"], 1, lengths_of(HISTOGRAM, 512))
        predicted = step_time(settings, [load], cluster(1), Design.of(settings), jitter=0).seconds
        assert 1e3 * predicted == pytest.approx(row["ms_per_step"], rel=0.07)


@pytest.mark.parametrize("length", [128, 512, 2048])
def test_narrow_heads_take_as_long_as_measured(length: int) -> None:
    """6 layers with heads of 32 on an H200, 32,768 tokens of full rows, both precisions."""
    raw = json.loads((ROOT / "benchmarks" / "results" / "gpu_sizes.json").read_text())["results"]
    rows = [row for row in raw if (row["model"], row["length"], row["rows"]) == ("6x384", length, "full")]
    assert {row["precision"] for row in rows} == {"bf16", "fp8"}
    for row in rows:
        sizes = {
            "model.num_layers": 6, "model.hidden_size": 384, "model.num_heads": 12, "model.intermediate_size": 1536,
            "model.max_positions": max(512, length), "data.max_seq_length": length,
            "data.max_predictions": length * 3 // 20, "train.precision": row["precision"],
        }  # fmt: skip
        settings = resolve("bert-large-phase2", [(name, str(value)) for name, value in sizes.items()])
        load = full_bins(settings, 32768, 1, np.array([length]))
        predicted = step_time(settings, [load], cluster(1), Design.of(settings), jitter=0).seconds
        assert 1e3 * predicted == pytest.approx(row["bertrain"]["ms_per_step"], rel=0.07)


def test_a_run_is_planned_with_the_engine_that_computes_it() -> None:
    """Our kernels have heads of 32, which cost nearly as much as those of 64; others go through torch.compile."""
    designs, steps = {}, {}
    for size in (32, 48, 64, 96):
        settings = resolve("bert-base", [("model.num_heads", str(768 // size)), ("train.precision", "bf16")])
        settings = replace(settings, model=replace(settings.model, vocab_size=30522))
        load, designs[size] = full_bins(settings, 32768, 1, np.array([128])), Design.of(settings)
        steps[size] = step_time(settings, [load], cluster(1), designs[size], jitter=0)
        assert (designs[size].is_fused, designs[size].host_s > 0) == ((size in (32, 64)), size not in (32, 64))
    assert 1.2 * steps[64].attention < steps[32].attention < 2 * steps[64].attention  # twice the scores
    assert steps[32].products == steps[64].products < steps[96].products
    odd = resolve("mlperf-nvidia-1x8x48-packed", [("batch.token_budget", "24584")])
    assert predict_run(odd, lengths_of(HISTOGRAM, 512), find_gpu("h200"), 8, 8) is None, "FP8 needs multiples of 64"


def test_launches_without_graphs_take_as_long_as_measured() -> None:
    """Transformers' Trainer with a 6-layer model on an H200, all layers trained."""
    raw = json.loads((ROOT / "benchmarks" / "results" / "gpu_finetune.json").read_text())["summary"]
    settings = resolve("bert-base", [("model.num_layers", "6"), ("train.precision", "fp32")])
    kernels = settings.model.num_layers * HOST_LAUNCHES[0] + sum(HOST_LAUNCHES[1:])
    for how, name in (("eager", "trainer"), ("compiled", "trainer, compiled")):
        steps = [row[name]["ms_per_step"] for row in raw if not row[name]["settings"]["frozen_layers"]]
        assert 1e-3 * statistics.median(steps) / kernels == pytest.approx(HOST_S[how], rel=0.01)


def test_a_rank_without_graphs_waits_for_its_host() -> None:
    """Small bins take as long as their launches, large ones as long as their computation."""
    design = Design(host_s=HOST_S["eager"])
    small, large = (
        step_time(SETTINGS, [full_bins(SETTINGS, tokens, 1, np.array([512]))], cluster(1), design, jitter=0)
        for tokens in (512, 512 * 200)
    )
    launched = (24 * HOST_LAUNCHES[0] + HOST_LAUNCHES[1]) * HOST_S["eager"]
    assert small.seconds == pytest.approx(launched + small.optimizer)
    assert large.host == 0 < small.host
    graphs = replace(design, host_s=0.0)
    load = full_bins(SETTINGS, 512, 1, np.array([512]))
    assert step_time(SETTINGS, [load], cluster(1), graphs, jitter=0).host == 0
    evaluated = [evaluation_seconds(SETTINGS, cluster(1024), one, 10_000) for one in (graphs, design)]
    assert evaluated[0] < evaluated[1] == pytest.approx(launched / 3)
