"""ModernBERT's config.json of Transformers, in and out: the settings of `model.family modern`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bertrain.base.errors import UserError
from bertrain.config.settings import ModelSettings

MODEL_TYPE = "modernbert"
# Transformers' names of the fields of ModelSettings, and what Transformers takes for a missing one.
KEYS: dict[str, tuple[str, Any]] = {
    "vocab_size": ("vocab_size", 50368),
    "hidden_size": ("hidden_size", 768),
    "num_hidden_layers": ("num_layers", 22),
    "num_attention_heads": ("num_heads", 12),
    "intermediate_size": ("intermediate_size", 1152),
    "max_position_embeddings": ("max_positions", 8192),
    "initializer_range": ("initializer_range", 0.02),
    "norm_eps": ("layer_norm_eps", 1e-5),
    "local_attention": ("local_window", 128),
    "mlp_dropout": ("hidden_dropout", 0.0),
    "attention_dropout": ("attention_dropout", 0.0),
    "classifier_dropout": ("head_dropout", 0.0),
    "classifier_pooling": ("pooling", "cls"),
}
FIXED: dict[str, Any] = {
    "hidden_activation": "gelu",
    "classifier_activation": "gelu",
    "norm_bias": False,
    "attention_bias": False,
    "mlp_bias": False,
    "classifier_bias": False,
    "decoder_bias": True,
    "tie_word_embeddings": True,
    "rope_scaling": None,
}
"""Fields of which ModernBERT as it was released, and so model/modern.py, has one value."""
GLOBAL, LOCAL = "full_attention", "sliding_attention"
# By kind of layer: our setting, the name before Transformers 5, and the default.
THETAS = {
    GLOBAL: ("global_theta", "global_rope_theta", 160_000.0),
    LOCAL: ("local_theta", "local_rope_theta", 10_000.0),
}
EVERY = "global_attn_every_n_layers"  # its name before Transformers 5, which lists `layer_types` instead


def read_config(raw: dict[str, Any], path: Path) -> dict[str, Any]:
    """The fields of ModelSettings in a config.json; their types are not checked yet."""
    for key, expected in FIXED.items():
        if raw.get(key, expected) != expected:
            raise _unlike(path, key, raw[key], expected)
    thetas: dict[str, Any] = {}
    for kind, (ours, former, default) in THETAS.items():
        rope = (raw.get("rope_parameters") or {}).get(kind) or {}
        if rope.get("rope_type", "default") != "default":
            raise _unlike(path, "rope_type", rope["rope_type"], "default")
        theta = rope.get("rope_theta", raw.get(former, default))
        thetas[ours] = thetas["global_theta"] if theta is None else theta  # as Transformers before 5 read null
    found = {ours: raw.get(theirs, default) for theirs, (ours, default) in KEYS.items()}
    return found | thetas | {"family": "modern", "nsp": False, "global_every": _global_every(raw, path)}


def _global_every(raw: dict[str, Any], path: Path) -> Any:
    number, kinds = raw.get(EVERY, 3), raw.get("layer_types")
    if kinds is None:
        return number
    candidates = [number, *range(1, len(kinds) + 1)]
    for every in candidates:
        if isinstance(every, int) and every > 0 and kinds == layer_types(len(kinds), every):
            return every
    raise _unlike(path, "layer_types", kinds, layer_types(len(kinds), 3))


def layer_types(num_layers: int, every: int) -> list[str]:
    return [LOCAL if number % every else GLOBAL for number in range(num_layers)]


def write_config(settings: ModelSettings) -> dict[str, Any]:
    """The fields of config.json, readable by Transformers from 4.48 on."""
    written = {theirs: getattr(settings, ours) for theirs, (ours, _) in KEYS.items()}
    written |= {key: value for key, value in FIXED.items() if value is not None}
    written["embedding_dropout"] = settings.hidden_dropout
    if settings.pooling == "max":  # of a sentence-transformers folder; Transformers' classifiers do not have it
        written["classifier_pooling"] = "mean"
    thetas = {kind: getattr(settings, ours) for kind, (ours, _, _) in THETAS.items()}
    written["rope_parameters"] = {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in thetas.items()}
    written |= {former: thetas[kind] for kind, (_, former, _) in THETAS.items()}
    written["layer_types"] = layer_types(settings.num_layers, settings.global_every)
    return written | {EVERY: settings.global_every}


def _unlike(path: Path, key: str, value: Any, expected: Any) -> UserError:
    return UserError(
        "other-modernbert", f"{path} has {key} {value!r}; bertrain reads only ModernBERT models with {expected!r}"
    )
