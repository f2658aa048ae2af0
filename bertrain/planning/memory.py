"""How much memory a run needs on each rank, from its settings alone; memory_fit.py compares it with the machine.

`estimate` counts permanent memory, and what a bin or an update adds, by kind. Activations are counted as the plain and
the fused path keep them: `tests/numerics/test_memory.py` compares every term of the plain path with the bytes of live
tensors, `benchmarks/memory.py` whole runs with the size of their processes, `benchmarks/gpu_memory.py` those on a GPU.

Letters as in bert.py: T tokens of a bin, P predictions, E hidden size, F intermediate size, H heads, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from bertrain.base.formatting import GIB
from bertrain.config.choices import EngineName
from bertrain.config.model_size import count_parameters
from bertrain.config.settings import Settings
from bertrain.data.feed.batching import bin_capacity
from bertrain.data.formats.source import DataSource
from bertrain.model.attention import BLOCK_WINDOWS
from bertrain.optim.registry import OPTIMIZERS
from bertrain.optim.rules import AdamW

PROCESS = 540 << 20  # Python with torch and the loader's batches, on a CPU
LIBRARIES = "work space of libraries"
CONTEXT = 1 << 30  # CUDA's context, libraries and their work space, what the allocator cannot use


@dataclass(frozen=True)
class BinSize:
    """The sizes on which the memory of a bin depends."""

    tokens: int
    predictions: int
    attended: float
    """Tokens that a token attends to, on average."""

    @staticmethod
    def of(settings: Settings, shards: DataSource) -> BinSize:
        """The largest bin that these settings make of this data."""
        data, batch, lengths = settings.data, settings.batch, shards.lengths.astype(float)
        pads = batch.policy == "padded"
        # Padding, also at the end of a bin, is sequences of up to max_seq_length.
        attended = data.max_seq_length if pads else float((lengths**2).sum() / lengths.sum())
        predictions = 0 if settings.task.name else bin_capacity(settings, float(lengths.mean())).predictions
        return BinSize(batch.token_budget, predictions, attended)


@dataclass(frozen=True)
class Estimate:
    """Bytes on one rank: permanent, added by a bin, and added by an update after the bins."""

    always: dict[str, int]
    bin: dict[str, int]
    update: int

    @property
    def total(self) -> int:
        return sum(self.always.values()) + max(sum(self.bin.values()), self.update)

    def text(self) -> str:
        items = self.always | (self.bin if sum(self.bin.values()) >= self.update else {"the update": self.update})
        by_size = sorted(items.items(), key=lambda item: -item[1])
        return ", ".join(f"{name} {size / GIB:.2f}" for name, size in by_size if size >= 0.005 * GIB)


def estimate(settings: Settings, size: BinSize, *, ranks: int, engine: EngineName, on_gpu: bool) -> Estimate:
    """What a rank of this run needs, `size` being its largest bin."""
    parameters, matrices = count_parameters(settings.model)
    share = ranks if settings.optimizer.sharded else 1
    rule = OPTIMIZERS[settings.optimizer.name]
    moments = 4 * len(rule.BUFFERS) * parameters
    always = {"weights": 4 * parameters, "gradients": 4 * parameters, "moments": moments // share}
    is_fused = engine == "fused"
    if is_fused:
        always["narrow copies of the weights"] = 2 * parameters
        if settings.train.precision == "fp8":
            always["narrow copies of the weights"] += 2 * matrices
    if on_gpu:
        always["the GPU's context"] = CONTEXT
    else:
        always["the process"] = PROCESS
        if settings.checkpoint.enabled:
            always["a checkpoint being written"] = 4 * parameters + moments
    bin = _plain_bin(settings, size, on_gpu)
    if engine != "plain":
        bin = _fused_bin(settings, size) if is_fused else _compiled_bin(settings, size)
    if settings.model.rtd:
        bin["replaced words"] = _replaced_words(settings, size)
    has_kernels = is_fused and issubclass(rule, AdamW)
    update = 0 if has_kernels else rule.TEMPORARY_BYTES * parameters // share
    if not on_gpu:  # both measured: oneDNN reorders operands, and malloc keeps some of what a bin gave back
        bin[LIBRARIES] = sum(bin.values()) // 10
        update += sum(bin.values()) // 2
    return Estimate(always, bin, update)


def _plain_bin(settings: Settings, size: BinSize, on_gpu: bool) -> dict[str, int]:
    """What autograd keeps of a forward pass, and what the backward pass needs beside it at its worst."""
    model, tokens, what = settings.model, size.tokens, settings.train.activation_checkpointing
    width, vocab = model.hidden_size, model.padded_vocab_size
    narrow = settings.train.precision in ("bf16", "fp16")
    one = 2 if narrow else 4  # bytes of a product's operand
    layers = [_plain_layer(settings, size.attended, window, on_gpu) for window in model.windows]
    everything, products = zip(*layers, strict=True)
    kept = {"none": sum(everything), "selective": sum(products), "full": 4 * width * model.num_layers}[what]
    again = 0 if what == "none" else max(everything) - kept // model.num_layers
    # Gradients in the feed-forward network. Its activations with a gate are many, and gone when attention's turn comes.
    gradients, gone = (1, 0) if model.family == "bert" else (2, 4)
    inner = one * model.intermediate_size
    attention = int(2 * one * model.num_heads * size.attended) - gone * inner
    scores = size.predictions * vocab
    casts = 2 * count_parameters(model)[0] if narrow else 0
    return {"activations of a bin": tokens * (kept + 9 * width) + casts} | _larger(
        backward=tokens * (again + max(gradients * inner + 8 * width, attention)) + one * scores,
        # Scores, their logarithms, and the gradients of both; after them that of the words.
        scores=scores * (one + 12) + 4 * vocab * width,
    )


def _plain_layer(settings: Settings, attended: float, window: int | None, on_gpu: bool) -> tuple[int, int]:
    """Bytes per token that a layer keeps for its backward pass: of everything, and of its products alone."""
    model = settings.model
    width, inner = model.hidden_size, model.intermediate_size
    one = 2 if settings.train.precision in ("bf16", "fp16") else 4
    # Probabilities, what dropout leaves of them, its mask; a GPU computes the first in 32 bits and casts the second.
    drops = model.family == "bert" or model.attention_dropout > 0
    probability = (4 if on_gpu else one) + (one + 1 if drops else 0)
    if model.family == "bert":
        # Inputs of the four products, queries, keys and values, GELU's input; two sums for LayerNorm; two masks.
        everything = one * (6 * width + 2 * inner) + 8 * width + 2 * width
        return everything + int(model.num_heads * attended * probability), 4 * width + one * (5 * width + inner)
    # The same, with GELU's output and its gate. A window's keys and values lie there twice.
    everything = one * (6 * width + 4 * inner) + 8 * width
    if window is not None and attended > (2 + BLOCK_WINDOWS) * window:
        attended = (2 + BLOCK_WINDOWS) * window
        everything += one * 5 * width
    return everything + int(model.num_heads * attended * probability), 4 * width + one * (5 * width + 2 * inner)


def _compiled_bin(settings: Settings, size: BinSize) -> dict[str, int]:
    """What the compiled engine keeps: no probabilities, and not what its compiler recomputes; measured on an H200."""
    model, tokens = settings.model, size.tokens
    width, inner, vocab = model.hidden_size, model.intermediate_size, model.padded_vocab_size
    narrow = settings.train.precision in ("bf16", "fp16")
    one = 2 if narrow else 4
    inner *= 1 if model.family == "bert" else 2  # with a gate
    everything = one * (8 * width + 2 * inner) + 6 * width + 4 * model.num_heads
    kept = everything if settings.train.activation_checkpointing == "none" else 4 * width
    casts = 2 * count_parameters(model)[0] if narrow else 0
    gradients = 4 * count_parameters(model)[0]  # the compiled backward pass returns them before they are added
    return {"activations of a bin": tokens * (model.num_layers * kept + 9 * width) + casts + gradients} | _larger(
        backward=tokens * (everything - kept + 2 * one * inner + 8 * width),
        scores=size.predictions * vocab * (one + 12),
    )


def _replaced_words(settings: Settings, size: BinSize) -> int:
    """The head of replaced-token detection on all tokens, and the generator's scores; its weights are few."""
    one = 4 if settings.train.precision in ("fp32", "tf32", "bf32") else 2  # bytes
    head = size.tokens * 3 * one * settings.model.hidden_size
    scores = int(settings.data.replaced_share * size.predictions) * settings.model.vocab_size * one
    return head + scores


def _larger(*, backward: int, scores: int) -> dict[str, int]:
    """What comes on top of the activations: the two are not there at the same time."""
    return {"a layer's backward pass": backward} if backward > scores else {"scores of masked words": scores}


def _fused_bin(settings: Settings, size: BinSize) -> dict[str, int]:
    """The same on the kernels, which keep 16 bits, in fp8 8-bit copies beside some, and no probabilities."""
    model, tokens = settings.model, size.tokens
    width, inner, vocab = model.hidden_size, model.intermediate_size, model.padded_vocab_size
    eight = settings.train.precision == "fp8"
    products = 14 * width + 2 * inner + 4 * model.num_heads + 8  # with the layer's input; attention's sums, LayerNorm's
    # The first step of fp8 measures, in 16 bits. Later ones keep 8-bit copies of four inputs, transposed, and of GELU's
    # result nothing else.
    everything = products + 2 * width + 8 + (max(2 * inner, 3 * width + inner) if eight else 2 * inner)
    if model.family == "modern":
        # The residual twice, queries, keys, values, attention's result, and the gate beside GELU's argument; then the
        # two LayerNorms and GELU's result, in 8 bits nothing else of them.
        products = 12 * width + 4 * inner + 4 * model.num_heads + 16
        everything = products + 4 * width + 2 * inner
    kept = {"none": everything, "selective": products, "full": 2 * width}[settings.train.activation_checkpointing]
    # The last layer computes the rows alone that somebody reads, after attention.
    reads_all = settings.train.activation_checkpointing == "full" or model.rtd
    last = kept if reads_all else 10 * width + 4 * model.num_heads
    again = everything - kept
    casts = 24 * width if eight else 0  # a gradient in 16 bits and twice in 8, while the first step measures
    return {"activations of a bin": tokens * ((model.num_layers - 1) * kept + last + 4 * width)} | _larger(
        backward=tokens * (again + 24 * width + (4 if model.family == "bert" else 8) * inner + casts),
        scores=size.predictions * (2 * vocab + 16 * width) + 4 * vocab * width,
    )
