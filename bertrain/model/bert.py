"""BERT on packed sequences: the encoder of Devlin et al. (2018) with its two pre-training heads.

Ranks, precision and checkpoints are applied from `training/`. This file specifies what the fused path (fused.py)
computes. After a change here, models train with the compiled or plain engine until the fused path is changed too; see
fused_check.py.

Letters in shape comments: T tokens of a bin, S sequence slots, P prediction slots, E hidden size,
F intermediate size, H heads, D head size, V vocabulary (padded).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from bertrain.config.settings import ModelSettings
from bertrain.model.attention import AttentionPlan
from bertrain.model.batch import Batch
from bertrain.model.dropout import dropout
from bertrain.model.encoder import EncoderModel, WordEmbeddings
from bertrain.model.heads import MaskedWordHead, ReplacedWordHead, SentenceHead, answer_head


class Embeddings(WordEmbeddings):
    """Word + position + segment, then LayerNorm and dropout."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.words = nn.Embedding(settings.padded_vocab_size, settings.hidden_size)
        self.positions = nn.Embedding(settings.max_positions, settings.hidden_size)
        self.segments = nn.Embedding(settings.num_segments, settings.hidden_size)
        self.norm = nn.LayerNorm(settings.hidden_size, settings.layer_norm_eps)
        self.dropout = settings.hidden_dropout

    def forward(self, batch: Batch) -> Tensor:  # [T, E]
        x = self.words(batch.input_ids) + self.positions(batch.position_ids) + self.segments(batch.segment_ids)
        return dropout(self.norm(x), self.dropout, self.training)


class Layer(nn.Module):
    """Self-attention and a feed-forward network, each followed by dropout, residual and LayerNorm."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        width = settings.hidden_size
        self.heads, self.head_size = settings.num_heads, settings.head_size
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.attention_norm = nn.LayerNorm(width, settings.layer_norm_eps)
        self.expand = nn.Linear(width, settings.intermediate_size)
        self.contract = nn.Linear(settings.intermediate_size, width)
        self.output_norm = nn.LayerNorm(width, settings.layer_norm_eps)
        self.hidden_dropout, self.attention_dropout = settings.hidden_dropout, settings.attention_dropout

    def forward(self, x: Tensor, plan: AttentionPlan) -> Tensor:  # [T, E] -> [T, E]
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, self.head_size))
        attended = plan.attend(qkv, self.attention_dropout if self.training else 0.0).flatten(-2)
        x = self.attention_norm(x + dropout(self.attention_out(attended), self.hidden_dropout, self.training))
        expanded = F.gelu(self.expand(x))
        return self.output_norm(x + dropout(self.contract(expanded), self.hidden_dropout, self.training))


class Bert(EncoderModel):
    """BERT with the heads of pre-training, or one for fine-tuning."""

    embeddings: Embeddings

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__(settings)
        self.embeddings = Embeddings(settings)
        self.layers = nn.ModuleList(Layer(settings) for _ in range(settings.num_layers))
        is_pretrained = settings.head == "pretrain"
        self.masked_words = MaskedWordHead(settings) if is_pretrained else None
        self.next_sentence = SentenceHead(settings, 2) if is_pretrained and settings.nsp else None
        self.replaced_words = ReplacedWordHead(settings) if is_pretrained and settings.rtd else None
        self.answer = answer_head(settings)

    def encode(self, batch: Batch) -> Tensor:
        plan = self.plan_attention(batch)
        x = self.embeddings(batch)
        for layer in self.layers:
            x = layer(x, plan)
        return x
