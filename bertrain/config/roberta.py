"""RoBERTa: BERT with one segment, no next-sentence prediction, and position embeddings counted from `pad_token_id` + 1.

Here it is `model.family bert` with `model.num_segments 1` (`ModelSettings.is_roberta`): all else follows from that. Its
position embeddings begin with reserved rows, which no token of a text has. We leave them out, and write them as zeros.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bertrain.base.errors import UserError

MODEL_TYPE = "roberta"
PAD_ID = 1  # in RoBERTa's own vocabulary; Transformers takes it for a missing one
POSITIONS = "max_position_embeddings"


def num_reserved(raw: dict[str, Any], path: Path) -> int:
    """The rows before the first position of a text, by a config.json."""
    pad_id = raw.get("pad_token_id", PAD_ID)
    if not isinstance(pad_id, int) or not 0 <= pad_id < raw.get(POSITIONS, 512):
        needed = f"RoBERTa needs a whole number from 0 to below {POSITIONS}"
        raise UserError("bad-config", f"{path} has pad_token_id {pad_id!r}; {needed}")
    return pad_id + 1


def adapt_fields(fields: dict[str, Any], raw: dict[str, Any], path: Path) -> dict[str, Any]:
    """The fields of ModelSettings, from those that a config.json has as BERT's."""
    if (types := raw.get("type_vocab_size", 1)) != 1:
        raise UserError("not-a-bert", f"{path} has type_vocab_size {types!r}; RoBERTa has 1")
    rows = raw.get(POSITIONS, 512)
    if not isinstance(rows, int):
        raise UserError("bad-config", f"{path} has {POSITIONS} {rows!r}; it must be a whole number")
    return fields | {"num_segments": 1, "nsp": False, "max_positions": rows - num_reserved(raw, path)}
