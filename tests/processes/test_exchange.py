"""What travels between ranks, on real gloo processes: against DistributedDataParallel, formulas and one rank alone."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from bertrain.config.settings import Settings
from bertrain.data.feed.loader import Loader, Step
from bertrain.data.formats.shards import Shards
from bertrain.model.arena import Arena
from bertrain.model.bert import Bert
from bertrain.model.heads import pretraining_sums
from bertrain.model.initialization import initialize
from bertrain.optim import muon
from bertrain.optim.registry import OPTIMIZERS
from bertrain.ranks.parallel import Ranks
from bertrain.run.metrics import Stopwatch
from bertrain.training import exchange
from bertrain.training.loop import train_step
from bertrain.training.state import TrainState
from tests import helpers

CPU = torch.device("cpu")
SETTINGS = {"batch__token_budget": 140, "batch__sequences": 24}  # some ten bins to a step
LIMIT = 0.05  # well below the gradient's norm, so that clipping bites


def gradient_of(state: TrainState, step: Step, buckets_on_the_way: list[int] | None = None) -> Tensor:
    """The gradient after the exchange, before the optimizer sees it."""
    state.engine.begin(step)
    state.exchange.begin()
    for number, batch in enumerate(step.bins, start=1):
        state.engine.add_bin(batch, step, is_last=number == len(step.bins))
    if buckets_on_the_way is not None:
        buckets_on_the_way.append(state.exchange._next)
    state.exchange.finish()
    return state.arena.gradients.clone()


def own_share(settings: Settings, step: Step) -> Tensor:
    """This rank's part of the step's gradient, by itself."""
    return gradient_of(TrainState.build(settings, Ranks(0, 1, CPU)), step)


def shares_of_all(share: Tensor, world: int) -> list[Tensor]:
    shares = [torch.empty_like(share) for _ in range(world)]
    dist.all_gather(shares, share)
    return shares


def check_against_ddp(data: Path, ranks: Ranks) -> None:
    """The sum of all ranks is DistributedDataParallel's, and most of it has left before the backward pass ended."""
    settings = helpers.tiny_settings(**SETTINGS)
    state = TrainState.build(settings, ranks)
    step = Loader(Shards.open(data), settings, rank=ranks.rank, world=ranks.world).step(0, 0)
    sent: list[int] = []
    ours = gradient_of(state, step, sent)
    assert len(state.exchange.buckets) > 5
    assert sent[0] >= len(state.exchange.buckets) - 2, "only what the embeddings hold is left"

    model = Bert(settings.model)
    initialize(model, settings.train.seed)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=0.03)
    for number, batch in enumerate(bin.without_padding() for bin in step.bins):
        torch.manual_seed(batch.dropout_seed)
        with ddp.no_sync() if number < len(step.bins) - 1 else torch.enable_grad():
            outputs = ddp(batch)
            sums = pretraining_sums(outputs.mlm_logits, outputs.nsp_logits, batch)
            (ranks.world * (sums.mlm_loss / step.num_predictions + sums.sequence_loss / step.num_sequences)).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(state.arena.view(ours, name), parameter.grad, rtol=1e-4, atol=1e-7)


def check_clipping(data: Path, ranks: Ranks) -> None:
    """Global, local and bucket clipping are what the formulas say, accumulation included, with a loss scale too."""
    plain = helpers.tiny_settings(**SETTINGS, optimizer__clip_norm=0)
    step = Loader(Shards.open(data), plain, rank=ranks.rank, world=ranks.world).step(0, 0)
    assert len(step.bins) > 1, "there is accumulation"
    shares = shares_of_all(own_share(plain, step), ranks.world)
    total = sum(shares[1:], shares[0])
    for clipping in ("global", "local", "bucket"):
        settings = helpers.tiny_settings(**SETTINGS, optimizer__clip_norm=LIMIT, optimizer__clipping=clipping)
        state = TrainState.build(settings, ranks)
        buckets = {"global": [], "local": [range(len(total))], "bucket": state.exchange.buckets}[clipping]
        expected = total.clone() if clipping == "global" else torch.zeros_like(total)
        for bucket in buckets:
            inside = slice(bucket.start, bucket.stop)
            for share in shares:
                whole = ranks.world * share[inside]
                expected[inside] += whole / ranks.world * min(1.0, LIMIT / (len(buckets) ** 0.5 * float(whole.norm())))
        sums = gradient_of(state, step)
        torch.testing.assert_close(sums, expected, rtol=1e-4, atol=1e-8)
        norm, factor = state.exchange.norm_and_factor()
        torch.testing.assert_close(norm, expected.norm(), rtol=1e-4, atol=0)
        wanted = LIMIT / float(norm) if clipping == "global" else 1.0
        assert float(factor) == pytest.approx(wanted, rel=1e-4)
        if clipping != "global":
            assert float(norm) <= LIMIT * 1.0001, "no rank can contribute more than its part of the limit"


def check_gentle_clipping_is_none(data: Path, ranks: Ranks) -> None:
    """A limit that no share reaches leaves all three ways equal to plain global clipping."""
    results = []
    for clipping in ("global", "local", "bucket"):
        settings = helpers.tiny_settings(**SETTINGS, optimizer__clip_norm=1e4, optimizer__clipping=clipping)
        step = Loader(Shards.open(data), settings, rank=ranks.rank, world=ranks.world).step(0, 0)
        results.append(gradient_of(TrainState.build(settings, ranks), step))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def check_sharded(data: Path, ranks: Ranks) -> None:
    """The sharded optimizer trains as the whole one does, on a share of its memory, and saves the same checkpoint."""
    for rule, clipping in [*((rule, "global") for rule in OPTIMIZERS), ("adamw", "bucket")]:
        states = []
        for sharded in (False, True):
            settings = helpers.tiny_settings(
                **SETTINGS, optimizer__name=rule, optimizer__sharded=sharded, optimizer__clipping=clipping,
                optimizer__clip_norm=LIMIT,
            )  # fmt: skip
            state = TrainState.build(settings, ranks)
            loader = Loader(Shards.open(data), settings, rank=ranks.rank, world=ranks.world)
            for number in range(3):
                train_step(state, loader.step(number, 24 * number), settings, ranks, Stopwatch(CPU))
            states.append(state)
        whole, shard = states
        sizes = [sum(buffer.numel() for buffer in state.optimizer.buffers.values()) for state in states]
        assert sizes[1] * ranks.world <= sizes[0] * 1.01 + 64 * ranks.world
        borders = {shard.arena.shard(number, ranks.world).start for number in range(1, ranks.world)}
        cut = [s for s in shard.arena.segments if any(s.start < border < s.stop for border in borders)]
        assert any(segment.is_adapted for segment in cut), "a matrix straddles two shards"
        for name, value in whole.arena.named(whole.arena.values).items():
            torch.testing.assert_close(
                shard.arena.view(shard.arena.values, name), value, rtol=1e-5, atol=1e-7, msg=f"{rule}: {name}"
            )
        one, other = whole.snapshot(), shard.snapshot()
        assert (one is None) == (other is None) == (not ranks.is_first)
        if one is not None and other is not None:
            assert one.optimizer.keys() == other.optimizer.keys()
            assert one.progress == other.progress
            for name, tensor in one.optimizer.items():
                difference = other.optimizer[name] - tensor  # sums over ranks are made in another order
                assert difference.norm() <= 1e-5 * tensor.norm() + 1e-12, name
            fresh = TrainState.build(settings, Ranks(0, 1, CPU))  # one rank takes up what many have saved
            fresh.optimizer.load(other.optimizer, other.progress.updates)
            for name, tensor in fresh.optimizer.state().items():
                assert torch.equal(tensor, other.optimizer[name])


def check_sixteen_bits(data: Path, ranks: Ranks) -> None:
    """Each part is rounded once and the sum once, in bf16 or fp16; a shard's owner keeps the sum in fp32."""
    plain = helpers.tiny_settings(**SETTINGS)
    step = Loader(Shards.open(data), plain, rank=ranks.rank, world=ranks.world).step(0, 0)
    shares = shares_of_all(own_share(plain, step), ranks.world)
    total = sum(shares[1:], shares[0])
    sizes = sum((share.abs() for share in shares[1:]), shares[0].abs())
    errors = {}
    for form, significant_bits, smallest in (("bf16", 8, 0.0), ("fp16", 11, 2.0**-25)):
        for sharded in (False, True):
            settings = helpers.tiny_settings(
                **SETTINGS, train__exchange_precision=form, train__precision="fp16" if form == "fp16" else "fp32",
                optimizer__sharded=sharded,
            )  # fmt: skip
            state = TrainState.build(replace(settings, train=replace(settings.train, precision="fp32")), ranks)
            ours = gradient_of(state, step)
            span = state.exchange.span
            own = slice(span.start, min(span.stop, len(total)))
            error = (ours[own] - total[own]).abs()
            rounded = sizes[own] + (0 if sharded else total[own].abs())
            assert (error <= 2.0**-significant_bits * rounded * 1.02 + smallest * (ranks.world + 1)).all()
            errors[form, sharded] = float(error.norm() / total[own].norm())
            if not sharded:
                assert all(torch.equal(ours, other) for other in shares_of_all(ours, ranks.world))
    assert 1e-4 < errors["bf16", False] < 4e-3, errors
    assert 1e-5 < errors["fp16", False] < errors["bf16", False] / 4, errors
    assert 0 < errors["bf16", True] < 4e-3


def check_warm_up(data: Path, ranks: Ranks) -> None:
    """What is done before the clock starts changes nothing that a step sees."""
    settings = helpers.tiny_settings(**SETTINGS)
    loader = Loader(Shards.open(data), settings, rank=ranks.rank, world=ranks.world)
    states = [TrainState.build(settings, ranks) for _ in range(2)]
    states[0].warm_up(loader.step(0, 0))
    for state in states:
        train_step(state, loader.step(0, 0), settings, ranks, Stopwatch(CPU))
    assert torch.equal(states[0].arena.values, states[1].arena.values)


CHECKS: list[Callable[[Path, Ranks], None]] = [
    check_against_ddp,
    check_clipping,
    check_gentle_clipping_is_none,
    check_sharded,
    check_sixteen_bits,
    check_warm_up,
]


def run_checks(rank: int, world: int, data: Path, meeting_place: str) -> None:
    torch.set_num_threads(1)
    exchange.MEGABYTE = 256  # the model is tiny, so its buckets are
    muon.product_dtype = lambda device: torch.float32  # in bf16, sums in another order may round to another value
    dist.init_process_group("gloo", init_method=f"file://{meeting_place}", rank=rank, world_size=world)
    ranks = Ranks(rank, world, CPU, dist.new_group(backend="gloo"))
    for check in CHECKS:
        check(data, ranks)
    dist.destroy_process_group()
    os._exit(0)  # as bertrain's own ranks leave: gloo's threads may abort an interpreter that is being taken down


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_together(tmp_path: Path, world: int) -> None:
    data = helpers.make_data(tmp_path)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run_checks, (world, data, os.path.join(folder, "meeting")), nprocs=world)


def test_buckets_cover_the_arena_once_from_its_end() -> None:
    """And they begin at the same places however many shards the arena is padded for."""
    starts = []
    for shards in (1, 2, 3, 7):
        arena = Arena(helpers.build_model(helpers.tiny_settings().model), shards=shards)
        assert len(arena.values) % shards == 0
        buckets = arena.buckets(2000)
        assert [bucket.stop for bucket in buckets] == [len(arena.values), *(bucket.start for bucket in buckets[:-1])]
        starts.append([bucket.start for bucket in buckets])
    assert starts[0][-1] == 0
    assert len(starts[0]) > 5
    assert all(other == starts[0] for other in starts)
