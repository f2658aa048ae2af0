"""Read and write what a sentence-transformers folder says beside its weights: pooling, length and normalization.

modules.json                      the modules in order: Transformer, Pooling, and Normalize or not
1_Pooling/config.json             how the vector of a text is pooled from its tokens
sentence_bert_config.json         the longest text in tokens
config_sentence_transformers.json prompts, and how vectors are compared
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bertrain.base.errors import UserError
from bertrain.base.files import read_json
from bertrain.config.choices import Pooling
from bertrain.data.text.vocabulary import TOKENIZER_CONFIG

MODULES, LENGTH, PROMPTS = "modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"
POOLING_FOLDER, NORMALIZE_FOLDER = "1_Pooling", "2_Normalize"
OLD_MODES = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
}  # the fields of versions before 6, each true or false
POOLINGS: tuple[Pooling, ...] = ("mean", "cls", "max")


@dataclass(frozen=True)
class SentencePipeline:
    """How a sentence-transformers model makes one vector of a text."""

    pooling: Pooling = "mean"
    normalize: bool = True
    max_seq_length: int = 0  # tokens with [CLS] and [SEP]; 0: as many as the model has positions


def find_pipeline(path: Path) -> SentencePipeline | None:
    """The pipeline of the folder that weights at `path` are in."""
    return read_pipeline(path if path.is_dir() else path.parent)


def read_pipeline(folder: Path) -> SentencePipeline | None:
    """The pipeline of a folder; None if it has no modules.json. Refuses modules that bertrain does not compute."""
    if not (folder / MODULES).is_file():
        return None
    modules = read_json(folder / MODULES, [{"type": str, "path": Path}])
    kinds = [module["type"].rpartition(".")[2] for module in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]) or modules[0]["path"].name:
        expected = "Transformer (in the folder itself), Pooling, and Normalize or not"
        raise _refusal(folder / MODULES, f"has the modules {', '.join(kinds)}; bertrain computes {expected}")
    prompts = read_json(folder / PROMPTS, {}) if (folder / PROMPTS).is_file() else {}
    if name := prompts.get("default_prompt_name"):
        raise _refusal(folder / PROMPTS, f"puts the prompt {name!r} before each text; do that in the texts instead")
    return SentencePipeline(
        pooling=_read_pooling(folder / modules[1]["path"] / "config.json"),
        normalize="Normalize" in kinds,
        max_seq_length=_read_length(folder),
    )


def _read_pooling(path: Path) -> Pooling:
    fields = read_json(path, {})
    modes = [fields["pooling_mode"]] if "pooling_mode" in fields else []
    if not modes:
        set_modes = [name for name, value in fields.items() if name.startswith("pooling_mode_") and value]
        modes = [OLD_MODES.get(name, name) for name in set_modes]
    for pooling in POOLINGS:
        if modes == [pooling]:
            return pooling
    found = " and ".join(map(str, modes)) or "no pooling"
    raise _refusal(path, f"pools by {found}; bertrain pools by one of {', '.join(POOLINGS)}")


def _read_length(folder: Path) -> int:
    for name, key in ((LENGTH, "max_seq_length"), (TOKENIZER_CONFIG, "model_max_length")):
        value = read_json(folder / name, {}).get(key) if (folder / name).is_file() else None
        if isinstance(value, int) and 2 < value < 1 << 20:  # tokenizers without a limit name a huge number
            return value
    return 0


def write_pipeline(folder: Path, pipeline: SentencePipeline, width: int) -> None:
    """Write the files that make a Hugging Face folder one of sentence-transformers; versions 2 to 6 read them."""
    package = "sentence_transformers.models"
    kinds = {"Transformer": "", "Pooling": POOLING_FOLDER}
    kinds |= {"Normalize": NORMALIZE_FOLDER} if pipeline.normalize else {}
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"{package}.{kind}"}
        for number, (kind, path) in enumerate(kinds.items())
    ]
    pooling = {"word_embedding_dimension": width} | {name: mode == pipeline.pooling for name, mode in OLD_MODES.items()}
    contents: dict[str, Any] = {
        MODULES: modules,
        f"{POOLING_FOLDER}/config.json": pooling,
        LENGTH: {"max_seq_length": pipeline.max_seq_length, "do_lower_case": False},
        PROMPTS: {"prompts": {}, "default_prompt_name": None, "similarity_fn_name": "cosine"},
    }
    for place in kinds.values():
        (folder / place).mkdir(exist_ok=True)
    for name, content in contents.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")


def _refusal(path: Path, reason: str) -> UserError:
    return UserError("unsupported-pipeline", f"{path} {reason}")
