"""Initial weights: those of BERT, or others that shorten the plateau of the first millions of tokens.

On this plateau of the loss, a model predicts words by their frequency and copies the visible ones. Two settings shorten
it. `initial_bias = "frequencies"` initializes the output bias with the frequencies: see `set_word_bias`. `initial_heads
= "neighbours"` lets heads distinguish positions. Position embeddings start as sines and cosines, in which moving by a
position is a rotation, and each head of the first layer starts with the rotation that attends one, two, ... positions
away. Training can change all of these weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from bertrain.base.seeds import derive
from bertrain.config.settings import ModelSettings
from bertrain.model.bert import Bert, Layer
from bertrain.model.encoder import EncoderModel
from bertrain.model.families import new_model

WORD_BIAS = "masked_words.bias"
CUT = 2.0  # the normal distribution is truncated at this many deviations
# In units of initializer_range. The heads read the waves after LayerNorm; below about 1.5, attention is too blurred to
# leave the plateau.
WAVE_AMPLITUDE = 2 * math.sqrt(2)
SHORTEST_WAVE, LONGEST_WAVE = 2.2, 130.0  # in positions


class _WithoutInit(TorchFunctionMode):
    """Skips torch.nn.init: its values are overwritten, and on the meta device it imports the compiler for seconds."""

    def __torch_function__(
        self, func: Callable, types: object, args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        is_init = getattr(func, "__module__", "") == "torch.nn.init"
        return (*args, kwargs.get("tensor"))[0] if is_init else func(*args, **kwargs)


def uninitialized(settings: ModelSettings, device: torch.device | str = "meta") -> EncoderModel:
    """A model whose weights are not set; by default only their names and shapes, without memory."""
    with torch.device(device), _WithoutInit():
        return new_model(settings)


def initialize(model: EncoderModel, seed: int, names: Collection[str] | None = None) -> None:
    """Set initial weights; each tensor has its own generator, seeded by its name.

    With `names`, sets only these tensors, since the others are loaded afterwards and a large model takes seconds to
    draw. The padding of the vocabulary is always set: imported weights do not have it.

    | tensor                    | value                                                         |
    | matrices and embeddings   | normal, deviation `initializer_range`, truncated at two       |
    | LayerNorm weight          | 1                                                             |
    | every bias                | 0                                                             |
    | padding of the vocabulary | 0                                                             |
    | modern: matrices that end a branch, and the heads': see `deviation_of`                    |
    | with `initial_bias = "frequencies"`: the masked-word bias, which `set_word_bias` sets afterwards |
    | with `initial_heads = "neighbours"`: positions and the first layer's queries and keys, see above |
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if names is not None and name not in names:
                continue
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
            elif parameter.ndim == 1:
                parameter.zero_()
            else:
                generator = torch.Generator().manual_seed(derive(seed, "weights", name))
                parameter.copy_(draw_normal(parameter.shape, deviation_of(name, model.settings), generator))
        model.embeddings.words.weight[model.settings.vocab_size :].zero_()
        if model.settings.initial_heads == "neighbours":
            assert isinstance(model, Bert)
            _attend_to_neighbors(model)


def set_word_bias(model: EncoderModel, shares: Tensor) -> None:
    """Set the bias of the masked-word head to the logarithm of each word's share of the words to predict.

    With a bias of 0, the one fast way to predict frequent words is a direction that the hidden vectors of all tokens
    share, since an update by Adam changes a bias by no more than the learning rate. With a large rate, the vectors
    collapse onto that direction, and the loss stays at the entropy of the shares.
    """
    bias = model.get_parameter(WORD_BIAS)[: model.settings.vocab_size]
    with torch.no_grad():
        bias.fill_(shares.min().log())  # words that the data's vocabulary lacks
        bias[: len(shares)].copy_(shares.log())


def deviation_of(name: str, settings: ModelSettings) -> float:
    """The deviation of a matrix. ModernBERT's residual is a sum over layers: what adds to it starts small."""
    if settings.family == "modern" and name.endswith("answer.classify.weight"):
        return settings.hidden_size**-0.5
    if settings.family == "modern" and name.endswith(("attention_out.weight", "contract.weight", "transform.weight")):
        return settings.initializer_range / math.sqrt(2 * settings.num_layers)
    return settings.initializer_range


def draw_normal(shape: torch.Size, deviation: float, generator: torch.Generator) -> Tensor:
    """Draw from a normal distribution truncated at two deviations: its inverse distribution function of a uniform.

    PyTorch's trunc_normal_ redraws the values outside; it takes six times as long (25 s for BERT-Large on two cores),
    and its values differ between versions.
    """
    drawn = torch.empty(shape).uniform_(-1, 1, generator=generator).mul_(math.erf(CUT / math.sqrt(2)))
    limit = CUT * deviation
    return drawn.erfinv_().mul_(math.sqrt(2) * deviation).clamp_(-limit, limit)


def _attend_to_neighbors(model: Bert) -> None:
    settings = model.settings
    size = settings.head_size // 2 * 2  # pairs of a sine and a cosine
    waves = position_waves(settings.max_positions, size)
    positions = model.embeddings.positions.weight.zero_()
    positions[:, :size].copy_(waves * (WAVE_AMPLITUDE * settings.initializer_range))
    first = model.layers[0]
    assert isinstance(first, Layer)
    weight = first.qkv.weight.unflatten(0, (3, settings.num_heads, settings.head_size))
    query, key = weight[0].zero_(), weight[1].zero_()  # [H, D, E]
    for head in range(settings.num_heads):
        query[head, :size, :size].copy_(shift(neighbor_of(head), size))
        key[head, :size, :size].copy_(torch.eye(size))


def neighbor_of(head: int) -> int:
    """The relative position that a head initially attends to: -1, 1, -2, 2, -3, ..."""
    distance = head // 2 + 1
    return -distance if head % 2 == 0 else distance


def frequencies(size: int) -> Tensor:
    """`size / 2` angles per position, from the shortest wave to the longest, in equal ratios."""
    count = size // 2
    ratio = (SHORTEST_WAVE / LONGEST_WAVE) ** (torch.arange(count) / max(1, count - 1))
    return 2 * math.pi / SHORTEST_WAVE * ratio


def position_waves(count: int, size: int) -> Tensor:
    """[count, size]: sines in the first half of the columns, cosines in the second."""
    angles = torch.arange(count)[:, None] * frequencies(size)
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def shift(places: int, size: int) -> Tensor:
    """The rotation from the waves of a position to those of the position `places` further."""
    angles = places * frequencies(size)
    sine, cosine = angles.sin().diag(), angles.cos().diag()
    return torch.cat([torch.cat([cosine, sine], dim=1), torch.cat([-sine, cosine], dim=1)])
