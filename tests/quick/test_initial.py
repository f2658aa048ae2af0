"""Fresh weights with `model.initial_heads neighbours`: heads that look where they are said to look."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bertrain.config.settings import ModelSettings
from bertrain.model.bert import Bert, Layer
from bertrain.model.initialization import draw_normal, initialize, neighbor_of, position_waves, shift
from tests import helpers, whole_model


def settings_of(initial_heads: str, *, hidden_size: int = 128, num_heads: int = 4) -> ModelSettings:
    return helpers.tiny_settings(
        model__vocab_size=500, model__hidden_size=hidden_size, model__num_heads=num_heads,
        model__initial_heads=initial_heads,
    ).model  # fmt: skip


def fresh(model_settings: ModelSettings, seed: int) -> Bert:
    model = Bert(model_settings)
    initialize(model, seed)
    return model.eval()


@given(places=st.integers(-40, 40), size=st.integers(1, 64).map(lambda half: 2 * half))
def test_a_shift_moves_every_position_as_far(places: int, size: int) -> None:
    waves = position_waves(120, size)
    here = torch.arange(max(0, -places), min(120, 120 - places))
    # Angles grow to 340, of which float32 keeps five digits after the point.
    torch.testing.assert_close(waves[here] @ shift(places, size).T, waves[here + places], atol=1e-4, rtol=0)


def test_heads_take_turns_to_the_left_and_right() -> None:
    assert [neighbor_of(head) for head in range(7)] == [-1, 1, -2, 2, -3, 3, -4]


@given(seed=st.integers(0, 2**30))
@settings(max_examples=12)
def test_each_head_looks_at_its_neighbour_whatever_the_words(seed: int) -> None:
    model = fresh(settings_of("neighbours"), seed)
    torch.manual_seed(seed)
    length = model.settings.max_positions
    batch = whole_model.random_batch([length], length, 2, 5, length, 500)
    first = model.layers[0]
    assert isinstance(first, Layer)
    with torch.no_grad():
        query, key, _ = first.qkv(model.embeddings(batch)).unflatten(-1, (3, first.heads, first.head_size)).unbind(1)
    looked_at = torch.einsum("qhd,khd->hqk", query, key).argmax(-1)
    for head in range(first.heads):
        there = torch.arange(length) + neighbor_of(head)
        exists = (there >= 0) & (there < length)
        assert (looked_at[head] == there)[exists].float().mean() > 0.85, head


def test_all_else_is_drawn_as_ever() -> None:
    plain, model = fresh(settings_of("random"), 3), fresh(settings_of("neighbours"), 3)
    drawn = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        if name == "embeddings.positions.weight":
            assert parameter.abs().max() > 2 * 0.02
        elif name == "layers.0.qkv.weight":
            query, key, value = parameter.chunk(3)
            assert not torch.equal(query, drawn[name].chunk(3)[0])
            assert not torch.equal(key, drawn[name].chunk(3)[1])
            assert torch.equal(value, drawn[name].chunk(3)[2])
        else:
            assert torch.equal(parameter, drawn[name]), name


def test_an_odd_head_size_leaves_one_column_out() -> None:
    model = fresh(settings_of("neighbours", hidden_size=30, num_heads=2), 1)
    assert (model.embeddings.positions.weight[:, 14:] == 0).all()
    first = model.layers[0]
    assert isinstance(first, Layer)
    query = first.qkv.weight.unflatten(0, (3, 2, 15))[0]
    assert (query[:, 14] == 0).all()
    torch.testing.assert_close(query[:, :14, :14].square().sum(-1), torch.ones(2, 14))


def test_weights_are_normal_and_cut_at_two_deviations() -> None:
    drawn = draw_normal(torch.Size([1000, 1000]), 0.02, torch.Generator().manual_seed(1))
    assert 0.0399 < float(drawn.abs().max()) <= 0.04
    expected = 0.87962566 * 0.02  # sqrt(1 - 4 phi(2) / (2 Phi(2) - 1)), times the deviation before the cut
    assert float(drawn.std()) == pytest.approx(expected, rel=5e-3)
    assert abs(float(drawn.mean())) < 5 * expected / 1000
    for deviations in (0.5, 1.0, 1.5):
        share = math.erf(deviations / math.sqrt(2)) / math.erf(2 / math.sqrt(2))
        assert float((drawn.abs() < deviations * 0.02).float().mean()) == pytest.approx(share, abs=3e-3)


def test_what_others_will_bring_is_not_drawn() -> None:
    settings = settings_of("random")
    whole, part = fresh(settings, 3), Bert(settings)
    kept = {name: parameter.detach().clone() for name, parameter in part.named_parameters()}
    asked = ["embeddings.positions.weight", "layers.1.qkv.weight"]
    initialize(part, 3, asked)
    for name, parameter in part.named_parameters():
        if name == "embeddings.words.weight":
            assert not parameter[settings.vocab_size :].any()
            parameter, kept[name] = parameter[: settings.vocab_size], kept[name][: settings.vocab_size]
        assert torch.equal(parameter, dict(whole.named_parameters())[name] if name in asked else kept[name]), name
