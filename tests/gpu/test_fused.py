"""The whole model by hand on the kernels against bert.py under autograd, and a step of training through CUDA graphs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from bertrain.config.settings import Settings
from bertrain.data.feed.loader import Loader, Step
from bertrain.data.formats.shards import Shards
from bertrain.kernels.backend import available
from bertrain.ranks.parallel import Ranks
from bertrain.training.fused_engine import FusedEngine
from bertrain.training.plain_engine import PlainEngine
from bertrain.training.state import TrainState
from tests import helpers, twins, whole_model

USABLE, REASON = available("cuda") if torch.cuda.is_available() else (False, "no CUDA device")
pytestmark = pytest.mark.skipif(not USABLE, reason=REASON)
HAS_FP8 = USABLE and torch.cuda.get_device_capability() >= (8, 9)
needs_fp8 = pytest.mark.skipif(not HAS_FP8, reason="this GPU has no FP8")
PRECISIONS = ["bf16", pytest.param("fp8", marks=needs_fp8)]
MODERN: dict[str, object] = {"model__family": "modern", "model__global_every": 2, "model__local_window": 64}
# Windows shorter and longer than the sequences.
MODERN_BIN = MODERN | {"model__num_layers": 4, "model__intermediate_size": 384, "model__pad_vocab_to": 64}
FAMILIES = [pytest.param({}, id="bert"), pytest.param(MODERN_BIN, id="modern")]


# One bin: sums and gradients


def model_both_ways(
    device: str = "cuda", /, *, fp8: bool = False, dropout: float = 0.0, **overrides: object
) -> whole_model.BothWays:
    """A bin of all lengths, padding and empty slots; all parameters random, matrices as large as a fresh BERT's."""
    settings = helpers.tiny_settings(
        model__vocab_size=2000, model__hidden_size=256, model__num_heads=4,
        model__max_positions=520, data__max_seq_length=512, batch__token_budget=1024,
        model__hidden_dropout=dropout, model__attention_dropout=dropout, model__head_dropout=dropout,
        task__name="glue/mnli" if "model__head" in overrides else "",
        **({"model__num_layers": 3, "model__intermediate_size": 1024} | overrides),
    ).model  # fmt: skip
    torch.manual_seed(3)
    batch = whole_model.random_batch([300, 1, 512, 64, 5, 19, 2], 1024, 12, 250, 512, 2000)
    if settings.head != "pretrain":
        batch = whole_model.with_answers(batch, settings.head, settings.num_labels, settings.hidden_size)
    if settings.rtd:
        batch = whole_model.with_replaced_words(batch)
    return whole_model.BothWays(settings, batch, device, fp8=fp8, matrix_scale=0.2)


VARIANTS: list[dict[str, Any]] = [
    {"model__pad_vocab_to": 64, "model__num_segments": 3},
    {"model__nsp": False},
    {"model__rtd": 20.0, "data__generator": "any"},
    {"model__num_layers": 1},
    {"model__head": "classify", "model__num_labels": 3},
    {"model__head": "multilabel", "model__num_labels": 5},
    {"model__head": "regress"},
    {"model__head": "span"},
    {"model__head": "tag", "model__num_labels": 7},
    {"model__head": "embed"},
    {"model__head": "embed", "model__pooling": "cls"},
    MODERN_BIN,
    MODERN_BIN | {"model__num_layers": 1},
    MODERN_BIN | {"model__head": "embed"},
]


@pytest.mark.parametrize("overrides", VARIANTS)
def test_bf16_gradients_are_those_of_the_specification(overrides: dict[str, Any]) -> None:
    model = model_both_ways(**overrides)
    sums, errors, once = model.run(), model.errors(), model.gradients()
    print({name: f"{value:.1e}" for name, value in errors.items()})
    assert model.sums_error(sums) <= 1e-2
    is_modern, is_span = "model__family" in overrides, overrides.get("model__head") == "span"
    assert model.output_error() <= (1.5e-2 if is_modern else 1e-2)
    assert model.total_error() <= (1.5e-2 if is_modern else 1e-2)
    for name, value in errors.items():
        # These gradients are small sums of large terms; autocast is as far from float32 there.
        of_bert = 8e-2 if is_span else 2e-2 if name.startswith("masked_words.norm") else 1e-2
        assert value <= (3e-2 if is_modern else of_bert), name
    model.run(accumulate=True)
    for name, gradient in model.gradients().items():
        assert twins.error(gradient, 2 * once[name]) <= 1e-5, name


@needs_fp8
@pytest.mark.parametrize("overrides", VARIANTS)
def test_fp8_gradients_are_near_those_of_the_specification(overrides: dict[str, Any]) -> None:
    model = model_both_ways(fp8=True, **overrides)
    model.measure_scales()
    sums, errors, once = model.run(), model.errors(), model.gradients()
    print({name: f"{value:.1e}" for name, value in errors.items()})
    assert model.sums_error(sums) <= 5e-2
    is_modern = "model__family" in overrides
    assert model.total_error() <= (0.1 if is_modern else 5e-2)
    bound = 1.0 if overrides.get("model__head") == "span" else 0.2 if is_modern else 0.15
    assert 1e-3 < max(errors.values()) <= bound, max(errors, key=errors.__getitem__)
    model.run(accumulate=True)
    for name, gradient in model.gradients().items():
        assert twins.error(gradient, 2 * once[name]) <= 1e-5, name


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_dropout_follows_the_seed(family: dict[str, object], precision: str) -> None:
    model = model_both_ways(fp8=precision == "fp8", dropout=0.1, **family)
    if precision == "fp8":
        model.measure_scales()
    sums, gradients = zip(*((model.run(seed), model.gradients()) for seed in (7, 7, 8)), strict=True)
    assert torch.equal(sums[0], sums[1])
    assert not torch.equal(sums[0], sums[2])
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name]), name
        assert not torch.equal(gradient, gradients[2][name]), name


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_layers_computed_again_give_the_same_gradient_in_less_memory(family: dict[str, object], precision: str) -> None:
    model = model_both_ways(fp8=precision == "fp8", dropout=0.1, **family)
    if precision == "fp8":
        model.measure_scales()
    found, peaks = [], []
    for what in ("none", "selective", "full"):
        for layer in model.fused.layers:
            layer.recompute = what
        for gradient in model.gradients_in_place():
            gradient.fill_(float("nan"))
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        sums = model.run()
        peaks.append(torch.cuda.max_memory_allocated())
        found.append([tensor.cpu() for tensor in (sums, *model.gradients().values())])
    for less in found[1:]:
        assert all(map(torch.equal, found[0], less))
    assert peaks[0] > peaks[1] > peaks[2], peaks


# Steps of training


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Shards:
    return Shards.open(helpers.make_data(tmp_path_factory.mktemp("data")))


def training_settings(precision: str, **overrides: object) -> Settings:
    return helpers.tiny_settings(
        train__precision=precision, model__hidden_size=128, model__num_heads=2, model__intermediate_size=256,
        model__pad_vocab_to=64, **overrides,
    )  # fmt: skip


class Trainer:
    """A fresh model and all that a step changes."""

    def __init__(self, settings: Settings, *, fused: bool = True, graphs: bool = True) -> None:
        state = TrainState.build(settings, Ranks(0, 1, torch.device("cuda")))
        self.arena, self.optimizer = state.arena, state.optimizer
        self.engine = (FusedEngine if fused else PlainEngine)(
            state.model, state.arena, state.optimizer, state.exchange, state.ranks, settings
        )
        if isinstance(self.engine, FusedEngine) and not graphs:
            self.engine.uses_graphs = False
        self.engine.restore({})  # as a run begins

    def gradient_of(self, step: Step) -> torch.Tensor:
        """The gradient of a step's bins; what was captured of their shapes is used, what was not may be."""
        self.engine.begin(step)
        for batch in step.bins:
            self.engine.add_bin(batch, step, is_last=batch is step.bins[-1])
        return self.arena.gradients.clone()

    def step(self, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        """Sums and verdict."""
        self.gradient_of(step)
        verdict = self.engine.update(1e-3)
        return self.engine.sums.clone(), verdict

    def state(self) -> list[torch.Tensor]:
        """Weights, moments, the count of updates and the copies to compute with."""
        tensors = [self.arena.values, *self.optimizer.buffers.values()]
        tensors.append(self.optimizer.num_applied)
        if isinstance(self.engine, FusedEngine):
            tensors.append(self.engine._model.values16)
        return [tensor.clone() for tensor in tensors]


def make_steps(shards: Shards, settings: Settings, count: int) -> list[Step]:
    loader = Loader(shards, settings, pin_memory=True)
    return [loader.step(number, number * settings.batch.sequences) for number in range(count)]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("optimizer", ["lamb", "adamw"])
def test_graphs_repeat_what_was_run_eagerly(shards: Shards, precision: str, optimizer: str) -> None:
    settings = training_settings(precision, optimizer__name=optimizer)
    replayed, eager = Trainer(settings), Trainer(settings, graphs=False)
    steps = make_steps(shards, settings, 8)
    assert min(len(step.bins) for step in steps) > 1, "several bins make a step"
    for step in steps:
        for one, other in zip(replayed.step(step), eager.step(step), strict=True):
            assert torch.equal(one, other)
    assert all(map(torch.equal, replayed.state(), eager.state()))
    assert all(map(torch.equal, replayed.engine.state().values(), eager.engine.state().values()))
    assert isinstance(replayed.engine, FusedEngine)
    assert isinstance(eager.engine, FusedEngine)
    assert any(captured.graphs for captured in replayed.engine._captured.values())
    assert all(not captured.graphs for captured in eager.engine._captured.values())


@pytest.mark.parametrize("head", ["classify", "multilabel", "regress", "span", "tag"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_graphs_repeat_heads_to_fine_tune(shards: Shards, precision: str, head: str) -> None:
    """Dropout of the head included, which is drawn anew in each step."""
    settings = training_settings(
        precision, optimizer__name="adamw", model__head=head, model__num_labels=3, task__name="glue/mnli"
    )
    replayed, eager = Trainer(settings), Trainer(settings, graphs=False)
    steps = [
        replace(
            step,
            bins=[
                whole_model.with_answers(batch, head, 3, is_weighted=head in ("classify", "multilabel")).pin_memory()
                for batch in step.bins
            ],
        )
        for step in make_steps(shards, training_settings(precision), 6)
    ]
    for step in steps:
        for one, other in zip(replayed.step(step), eager.step(step), strict=True):
            assert torch.equal(one, other)
    assert all(map(torch.equal, replayed.state(), eager.state()))
    assert isinstance(replayed.engine, FusedEngine)
    assert any(captured.graphs for captured in replayed.engine._captured.values())


@pytest.mark.parametrize("what", ["selective", "full"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_training_is_the_same_with_less_kept(shards: Shards, precision: str, what: str) -> None:
    everything, less = (
        Trainer(training_settings(precision, train__activation_checkpointing=kept)) for kept in ("none", what)
    )
    for step in make_steps(shards, training_settings(precision), 6):  # as it is, captured, replayed
        for one, other in zip(everything.step(step), less.step(step), strict=True):
            assert torch.equal(one, other)
    assert all(map(torch.equal, everything.state(), less.state()))


def test_bins_of_a_step_add_up(shards: Shards) -> None:
    settings = training_settings("bf16", model__hidden_dropout=0, model__attention_dropout=0)
    exact_settings = training_settings("fp32", model__hidden_dropout=0, model__attention_dropout=0)
    (step,) = make_steps(shards, settings, 1)
    fused, exact = Trainer(settings), Trainer(exact_settings, fused=False)
    expected = exact.gradient_of(step)
    for _ in range(3):  # as it is, captured, replayed
        assert twins.error(fused.gradient_of(step), expected) <= 1e-2
        assert torch.allclose(fused.engine.sums[:2], exact.engine.sums[:2], rtol=1e-2)


@pytest.mark.parametrize("name", ["lamb", "adamw"])
def test_update_is_the_plain_optimizers(shards: Shards, name: str) -> None:
    settings = training_settings("bf16", optimizer__name=name)
    fused, plain = Trainer(settings), Trainer(settings, fused=False)
    for step in make_steps(shards, settings, 4):
        fused.gradient_of(step)
        plain.arena.gradients.copy_(fused.arena.gradients)
        plain.engine.sums.copy_(fused.engine.sums)
        verdicts = fused.engine.update(1e-3), plain.engine.update(1e-3)
        assert torch.allclose(*verdicts)
    for one, other in zip(fused.state(), plain.state(), strict=False):
        assert twins.error(one, other) <= 1e-5
    copy = fused.state()[-1]
    assert torch.equal(copy, fused.arena.values.bfloat16())


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_step_that_is_not_finite_changes_nothing(shards: Shards, precision: str) -> None:
    settings = training_settings(precision)
    trainer = Trainer(settings)
    *steps, poisoned, last = make_steps(shards, settings, 7)
    for step in steps:
        assert trainer.step(step)[1][1] == 1
    place = trainer.arena.view(trainer.arena.values, "layers.1.expand.weight")[3, 5]
    healthy = place.item()
    place.fill_(float("nan"))
    trainer.engine.restore({})
    before = trainer.state()
    verdict = trainer.step(poisoned)[1]
    assert verdict[1] == 0
    assert not torch.isfinite(verdict[0])
    assert all(map(twins.same_bits, trainer.state(), before))
    place.fill_(healthy)
    trainer.engine.restore({})
    assert trainer.step(last)[1][1] == 1
    assert torch.isfinite(trainer.arena.values).all()


def test_a_rank_without_a_bin_has_no_gradient(shards: Shards) -> None:
    trainer = Trainer(training_settings("bf16"))
    (step,) = make_steps(shards, training_settings("bf16"), 1)
    trainer.step(step)
    trainer.engine.begin(replace(step, bins=[]))
    assert (trainer.arena.gradients == 0).all()
    assert (trainer.engine.sums == 0).all()


@needs_fp8
def test_fp8_scales_are_measured_in_the_first_step(shards: Shards) -> None:
    settings = training_settings("fp8")
    trainer = Trainer(settings)
    trainer.step(make_steps(shards, settings, 1)[0])
    scales = trainer.engine.state()["fp8/scale"]
    sites = 8 * settings.model.num_layers
    unused = sites - 8 + 3  # the last layer's output goes to the heads, which compute in 16 bits
    assert (scales[:sites] == 1).nonzero().flatten().tolist() == [unused]
    weights = [
        trainer.arena.view(trainer.arena.values, f"layers.{layer}.{name}.weight")
        for layer in range(settings.model.num_layers)
        for name in ("qkv", "attention_out", "expand", "contract")
    ]
    peaks = torch.stack([weight.abs().max() for weight in weights])
    assert torch.allclose(scales[sites:], 448 / peaks, rtol=0.05), "those of the matrices, before the step's update"
