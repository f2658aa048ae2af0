"""ModernBERT on packed sequences: the encoder of Warner et al. (2024) with its prediction head.

Differences from bert.py: LayerNorm before each branch instead of after it, no biases, rotated queries and keys (RoPE)
instead of position embeddings, a gated feed-forward network (GeGLU), no segments and no next-sentence prediction. All
but every `global_every`-th layer attend within a window. Dropout is where Transformers has it.

Letters in shape comments: as in bert.py.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bertrain.config.settings import ModelSettings
from bertrain.model.attention import AttentionPlan
from bertrain.model.batch import Batch
from bertrain.model.dropout import dropout
from bertrain.model.encoder import EncoderModel, WordEmbeddings
from bertrain.model.heads import MaskedWordHead
from bertrain.model.pooling import pool

Waves = tuple[Tensor, Tensor]  # cosines and sines of the angles by which queries and keys are rotated, [T, 1, 1, D / 2]


class Embeddings(WordEmbeddings):
    """Words alone, then LayerNorm and dropout."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.words = nn.Embedding(settings.padded_vocab_size, settings.hidden_size)
        self.norm = _norm(settings)
        self.dropout = settings.hidden_dropout

    def forward(self, batch: Batch) -> Tensor:  # [T, E]
        return dropout(self.norm(self.words(batch.input_ids)), self.dropout, self.training)


class Layer(nn.Module):
    """Self-attention and a gated feed-forward network, each added to the residual; LayerNorm before each."""

    def __init__(self, settings: ModelSettings, number: int) -> None:
        super().__init__()
        width, inner = settings.hidden_size, settings.intermediate_size
        self.heads, self.head_size, self.window = settings.num_heads, settings.head_size, settings.windows[number]
        self.attention_norm = _norm(settings) if number else nn.Identity()  # the embeddings end with one
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.expand_norm = _norm(settings)
        self.expand = nn.Linear(width, 2 * inner, bias=False)
        self.contract = nn.Linear(inner, width, bias=False)
        self.hidden_dropout, self.attention_dropout = settings.hidden_dropout, settings.attention_dropout

    def forward(self, x: Tensor, plan: AttentionPlan, waves: Waves) -> Tensor:  # [T, E] -> [T, E]
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, self.head_size))
        dropped = self.attention_dropout if self.training else 0.0
        attended = plan.attend(rotate(qkv, waves), dropped, self.window).flatten(-2)
        x = x + dropout(self.attention_out(attended), self.attention_dropout, self.training)
        expanded, gate = self.expand(self.expand_norm(x)).chunk(2, -1)
        return x + self.contract(dropout(F.gelu(expanded) * gate, self.hidden_dropout, self.training))


class AnswerHead(nn.Module):
    """Transform, then scores: of texts (classify, multilabel, regress), words (tag) or tokens (span)."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.transform = nn.Linear(settings.hidden_size, settings.hidden_size, bias=False)
        self.norm = _norm(settings)
        outputs = {"regress": 1, "span": 2}.get(settings.head, settings.num_labels)
        self.classify = nn.Linear(settings.hidden_size, outputs)
        self.dropout = settings.head_dropout

    def forward(self, x: Tensor) -> Tensor:  # [rows, E] -> [rows, outputs]
        x = self.norm(F.gelu(self.transform(x)))
        return self.classify(dropout(x, self.dropout, self.training))


class Modern(EncoderModel):
    """ModernBERT with the head of masked words, or one for fine-tuning."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__(settings)
        self.embeddings = Embeddings(settings)
        self.layers = nn.ModuleList(Layer(settings, number) for number in range(settings.num_layers))
        self.final_norm = _norm(settings)
        self.masked_words = MaskedWordHead(settings, bias=False) if settings.head == "pretrain" else None
        self.next_sentence = self.replaced_words = None
        has_answers = settings.head not in ("pretrain", "embed")
        self.answer = AnswerHead(settings) if has_answers else None

    def encode(self, batch: Batch) -> Tensor:
        settings, plan = self.settings, self.plan_attention(batch)
        everywhere = waves_at(batch.position_ids, settings.head_size, settings.global_theta)
        nearby = waves_at(batch.position_ids, settings.head_size, settings.local_theta)
        x = self.embeddings(batch)
        for layer, window in zip(self.layers, settings.windows, strict=True):
            x = layer(x, plan, everywhere if window is None else nearby)
        return self.final_norm(x)

    def sentences(self, x: Tensor, batch: Batch) -> Tensor:
        return pool(x, batch, self.settings.pooling)


def waves_at(positions: Tensor, head_size: int, theta: float) -> Waves:
    """Angles in float32: position / theta ^ (2 i / D), for the i-th pair of a head's elements."""
    exponents = torch.arange(0, head_size, 2, dtype=torch.float32, device=positions.device) / head_size
    angles = (positions[:, None].float() * theta**-exponents)[:, None, None]
    return angles.cos(), angles.sin()


def rotate(qkv: Tensor, waves: Waves) -> Tensor:
    """Rotate the pairs (i, i + D / 2) of queries and keys by their angles, in float32; [T, 3, H, D] -> the same."""
    cosine, sine = waves
    left, right = qkv[:, :2].float().chunk(2, -1)
    rotated = torch.cat([left * cosine - right * sine, right * cosine + left * sine], -1)
    return torch.cat([rotated.to(qkv.dtype), qkv[:, 2:]], 1)


def _norm(settings: ModelSettings) -> nn.LayerNorm:
    return nn.LayerNorm(settings.hidden_size, settings.layer_norm_eps, bias=False)
