"""`bertrain weights export` and `import`: weights of any form known here into one that others load, or that we do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bertrain.base.errors import UserError
from bertrain.base.formatting import counted
from bertrain.weights import huggingface, nvidia
from bertrain.weights.source import NEWEST, open_source, read_weights, refuse_incomplete
from bertrain.weights.tensors import ENCODER, Kind, Weights, gather, in_a_sentence

FORMATS = ("huggingface", "nvidia")
PADDINGS = (1, 8, 64)


@dataclass(frozen=True)
class Imported:
    """What became of somebody's weights."""

    folder: str
    kind: Kind
    """What they were: run, huggingface, nvidia or tf1."""
    origin: str
    global_step: int | None
    taken: int
    missing: tuple[str, ...]
    """Tensors of a model with both heads, by our names, that were not there; nothing was put in their place."""
    left_over: tuple[str, ...]
    """Tensors that a BERT has no place for."""
    skipped: tuple[str, ...]
    """Tensors that are no weights: an optimizer's state, counters, constants."""
    padding: int
    """Rows that padded the vocabulary, which were left out."""
    rounded: tuple[str, ...]
    """Tensors that had 64 bits a number, and have 32 now."""
    lower_case: bool | None
    """Whether text is put into lower case before it is looked up; None without a vocabulary."""


def import_weights(
    source: str | Path,
    out: str | Path,
    *,
    config: str | Path | None = None,
    vocab: str | Path | None = None,
    pad_vocab_to: int = 1,
) -> Imported:
    """Turn weights of any known form into a Hugging Face folder at `out`, with the heads they have, in fp32.

    `config` and `vocab` are taken where no bert_config.json and no vocab.txt lie beside them.
    """
    _check_padding(pad_vocab_to)
    opened = open_source(source, config=Path(config) if config else None, vocab=Path(vocab) if vocab else None)
    weights = gather(opened)
    _refuse_incomplete_encoder(weights)
    huggingface.write_folder(Path(out), weights, pad_vocab_to=pad_vocab_to)
    return Imported(
        folder=str(out),
        kind=weights.kind,
        origin=weights.origin,
        global_step=weights.global_step,
        taken=len(weights.tensors),
        missing=tuple(weights.missing),
        left_over=weights.left_over,
        skipped=weights.skipped,
        padding=weights.padding,
        rounded=weights.rounded,
        lower_case=None if weights.vocabulary is None else weights.vocabulary.lower_case,
    )


def export(
    source: str | Path,
    out: str | Path,
    *,
    to: str = "huggingface",
    which: str = NEWEST,
    pad_vocab_to: int | None = None,
) -> Path:
    """Write the weights of a run's checkpoint (newest, best or a step), or of a folder, to the folder `out`.

    `to` is huggingface, or nvidia: a file as MLPerf's model.ckpt-28252.pt, its vocabulary padded to a multiple of 8
    unless `pad_vocab_to` says otherwise.
    """
    if to not in FORMATS:
        raise UserError(f"--to is one of {', '.join(FORMATS)}, not {to!r}")
    weights = read_weights(source, which)
    try:
        refuse_incomplete(weights)
    except UserError as error:
        raise UserError(f"{error}; `bertrain weights import` makes a folder of those that are there") from None
    if to == "nvidia":
        if weights.settings.head != "pretrain":
            raise UserError(
                f"{source} was fine-tuned; NVIDIA's programs load models with the heads of pre-training only"
            )
        if weights.missing:
            raise UserError(
                f"{source} lacks {in_a_sentence(weights.missing)}; NVIDIA's programs load models with both heads only"
            )
        padding = 8 if pad_vocab_to is None else pad_vocab_to
        _check_padding(padding)
        nvidia.write_folder(Path(out), weights, pad_vocab_to=padding)
        return Path(out)
    if weights.vocabulary is None:
        raise UserError(
            f"{source} has no vocabulary to export with its weights; `bertrain weights import --vocab FILE` adds one"
        )
    _check_padding(pad_vocab_to or 1)
    huggingface.write_folder(Path(out), weights, pad_vocab_to=pad_vocab_to or 1)
    return Path(out)


def _check_padding(pad_vocab_to: int) -> None:
    if pad_vocab_to not in PADDINGS:
        raise UserError(f"--pad-vocab-to is one of {', '.join(map(str, PADDINGS))}, not {pad_vocab_to}")


def _refuse_incomplete_encoder(weights: Weights) -> None:
    missing = [name for name in weights.missing if name.startswith(ENCODER)]
    if not weights.tensors:
        raise UserError(
            f"{weights.origin} holds no tensor of a BERT by any name known here; its own are "
            f"{in_a_sentence([*weights.left_over, *weights.skipped])}"
        )
    if missing:
        thirds = in_a_sentence(list(weights.thirds))
        alone = f"; of query, key and value there are only {thirds}" if thirds else ""
        count = counted(len(missing), "tensor")
        raise UserError(f"{weights.origin} lacks {count} of a BERT's encoder: {in_a_sentence(missing)}{alone}")
