"""The model card: README.md of an exported model, which says what it is, how good it is and how to use it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import bertrain
from bertrain.config.model_size import count_parameters
from bertrain.config.settings import Settings


def model_card(
    settings: Settings, metrics: Mapping[str, float], text: Mapping[str, Any], language: str, mask: str
) -> str:
    """The card of a pre-trained model, in Markdown with the header that model hubs read; `mask` is its mask word."""
    model = settings.model
    header = ["library_name: transformers", "pipeline_tag: fill-mask", "tags: [bert, bertrain]"]
    header += [f"language: {language}"] if language else []
    names = {
        "mlm_accuracy": "masked words predicted",
        "hidden_accuracy": "of those replaced by [MASK]",
        "constant_accuracy": "always the commonest word (baseline)",
        "nsp_accuracy": "next sentence predicted",
    }
    rows = [f"| {label} | {metrics[name]:.1%} |" for name, label in names.items() if name in metrics]
    return "\n".join(
        [
            "---", *header, "---", "",
            "# A BERT trained with bertrain", "",
            f"{model.num_layers} layers, {model.hidden_size} wide, {count_parameters(model)[0]:,} parameters, "
            f"vocabulary of {model.vocab_size:,} word pieces, up to {settings.data.max_seq_length} tokens.", "",
            "```python", "from transformers import pipeline", "",
            f'pipeline("fill-mask", "PATH/TO/THIS/FOLDER")("a {mask} .")', "```", "",
            "## Training data", "",
            f"{text['documents'] - text['held_out']:,} documents, and {text['held_out']:,} held out for evaluation; "
            "exact duplicates were left out.", "",
            f"## Results on {metrics['examples']:,.0f} examples of the held-out documents", "",
            "| what | value |", "|---|---|", *rows, "",
            f"Trained with bertrain {bertrain.__version__}. The license of the text applies; the model repeats what it "
            "read, its mistakes and prejudices included.", "",
        ]
    )  # fmt: skip
