"""Settings that our kernels cannot compute, so that a run is planned with the engine that will compute it."""

from __future__ import annotations

from bertrain.config.settings import Settings
from bertrain.data.feed.batching import SHAPES

MOST_TOKENS = 8 * 65_535  # rows of one launch: CUDA allows 65,535 blocks along y, and GELU's have eight rows


def why_unfit(settings: Settings, *, on_gpu: bool = True) -> str:
    """The setting that the kernels cannot compute in their own precisions; empty if they can compute all."""
    model, budget = settings.model, settings.batch.token_budget
    evaluated = settings.evaluate.batch_size * settings.data.max_seq_length
    if model.family != "bert" and model.head not in ("pretrain", "embed"):
        return f"model.family {model.family} has no kernels for model.head {model.head} yet"
    if on_gpu and budget > MOST_TOKENS:
        return f"batch.token_budget {budget:,} is more than the {MOST_TOKENS:,} of one launch"
    if on_gpu and evaluated > MOST_TOKENS:
        return f"evaluate.batch_size may take {evaluated:,} tokens, more than the {MOST_TOKENS:,} of one launch"
    if model.head_size not in (16, 32, 64, 128):
        return f"heads of {model.head_size} are not 16, 32, 64 or 128 wide"
    if settings.train.precision == "fp8":
        # FP8 products need multiples of 16 in every dimension; the smallest bin is a quarter of the budget.
        sizes = {
            "batch.token_budget": (budget, 16 * SHAPES),
            "model.intermediate_size": (model.intermediate_size, 16),
        }
        for name, (size, factor) in sizes.items():
            if size % factor:
                return f"{name} {size} is not a multiple of {factor}"
    return ""


def has_kernels(settings: Settings) -> bool:
    """Whether a GPU computes these settings with our kernels."""
    return settings.train.precision in ("bf16", "fp8") and not why_unfit(settings)
