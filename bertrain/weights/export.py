"""`bertrain weights export` and `import`: convert weights between formats."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from bertrain.base.console import remark, warn
from bertrain.base.errors import UserError
from bertrain.base.formatting import counted
from bertrain.run.folder import Run
from bertrain.weights import huggingface, onnx
from bertrain.weights.card import model_card
from bertrain.weights.hub import locate
from bertrain.weights.onnx_graph import VECTOR
from bertrain.weights.sentence_transformers import SentencePipeline, find_pipeline
from bertrain.weights.source import NEWEST, open_source, read_weights, refuse_incomplete, run_of, vocabulary_of
from bertrain.weights.tensors import WRITTEN_PADDINGS, Kind, Weights, list_names, load_tensors

PRECISIONS = {"huggingface": ("fp32", "fp16"), "nvidia": ("fp32",), "onnx": onnx.PRECISIONS}
"""By the format to write."""


@dataclass(frozen=True)
class Imported:
    folder: str
    kind: Kind  # their format: run, huggingface, nvidia or tf1
    origin: str
    global_step: int | None
    taken: int
    missing: tuple[str, ...]
    """Tensors of a model with both heads, by our names, that the source lacks; nothing replaces them."""
    left_over: tuple[str, ...]  # tensors that BERT does not have
    skipped: tuple[str, ...]  # tensors that are not weights: optimizer state, counters, constants
    padding: int  # rows of vocabulary padding that were dropped
    rounded: tuple[str, ...]  # tensors rounded from float64 to float32
    lower_case: bool | None  # whether the tokenizer lowercases text; None without a vocabulary


def import_weights(
    source: str | Path,
    out: str | Path,
    *,
    config: str | Path | None = None,
    vocab: str | Path | None = None,
    pad_vocab_to: int = 1,
) -> Imported:
    """Convert weights of any supported format to a Hugging Face folder `out`, with the heads they have, in fp32.

    `config` and `vocab` replace the bert_config.json and vocab.txt beside the weights.
    """
    _check_padding(pad_vocab_to)
    opened = open_source(source, config=Path(config) if config else None, vocab=Path(vocab) if vocab else None)
    weights = load_tensors(opened)
    _refuse_incomplete_encoder(weights)
    pipeline = _pipeline_of(opened.kind, source, "the encoder is imported alone")
    huggingface.write_folder(Path(out), weights, pad_vocab_to=pad_vocab_to, pipeline=pipeline)
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
    precision: str | None = None,
) -> Path:
    """Write the weights of a run's checkpoint (newest, best or a step), or of a folder, to the folder `out`.

    `to` is huggingface, with a model card if it is a run; nvidia: a file like MLPerf's model.ckpt-28252.pt, its
    vocabulary padded to a multiple of 8 or of `pad_vocab_to`; or onnx: a graph for onnxruntime. The `precision` is
    fp32; huggingface and onnx also have fp16, and onnx int8.

    Example: bertrain.export("runs/tiny", "exported")
    """
    if to not in PRECISIONS:
        raise UserError("unknown-format", f"--to is {to!r}; use {' or '.join(PRECISIONS)}")
    if (precision := precision or "fp32") not in PRECISIONS[to]:
        supported = " or ".join(PRECISIONS[to])
        raise UserError("unknown-precision", f"--precision is {precision!r}; --to {to} writes {supported}")
    if to == "onnx":
        if pad_vocab_to is not None:
            raise UserError("conflicting-options", "--to onnx does not pad the vocabulary; leave --pad-vocab-to out")
        return _export_onnx(source, Path(out), which, cast(onnx.Precision, precision))
    padding = pad_vocab_to if pad_vocab_to is not None else 8 if to == "nvidia" else 1
    _check_padding(padding)
    weights = read_weights(source, which)
    try:
        refuse_incomplete(weights)
    except UserError as error:
        raise UserError(error.code, f"{error}; `bertrain weights import` accepts weights without heads") from None
    if to == "huggingface":
        vocabulary_of(weights, source)
        card = model_card(Run.open(run_of(source)), weights.global_step) if weights.kind == "run" else ""
        pipeline, as_fp16 = _pipeline_of(weights.kind, source, "exporting the encoder alone"), precision == "fp16"
        huggingface.write_folder(
            Path(out), weights, pad_vocab_to=padding, card=card, as_fp16=as_fp16, pipeline=pipeline
        )
        return Path(out)
    if weights.settings.family != "bert" or weights.settings.is_roberta:
        kind = "RoBERTa" if weights.settings.is_roberta else f"model.family {weights.settings.family}"
        raise UserError("other-family", f"--to nvidia writes BERT, not {kind}; use --to huggingface")
    needs = "NVIDIA's programs load only models with both pre-training heads"
    if weights.settings.head != "pretrain":
        raise UserError("no-pretraining-head", f"{source} is fine-tuned; {needs}")
    if weights.missing:
        raise UserError("missing-tensors", f"{source} lacks {list_names(weights.missing)}; {needs}")
    huggingface.write_nvidia(Path(out), weights, pad_vocab_to=padding)
    return Path(out)


def _export_onnx(source: str | Path, out: Path, which: str, precision: onnx.Precision) -> Path:
    weights = _read_with_pipeline(source, which)
    if weights.settings.head == "pretrain":
        _refuse_incomplete_encoder(weights)  # an encoder without heads is exported as such
    else:
        refuse_incomplete(weights)
    vocabulary_of(weights, source)
    agreement = onnx.write_folder(out, weights, precision)
    remark(f"checked in onnxruntime: {agreement.describe()}")
    if weights.settings.head == "embed":
        scaled = "scaled to length 1" if weights.normalizes else "not scaled"
        remark(f"{VECTOR} is one vector per text: {weights.settings.pooling} pooling, {scaled}")
    elif "last_hidden_state" in agreement.outputs:
        remark("last_hidden_state is one vector per token; the graph does not pool them into one per text")
    return out


def _read_with_pipeline(source: str | Path, which: str) -> Weights:
    """Read weights; those of a sentence-transformers folder as an embedding model, if we compute its pipeline."""
    opened = open_source(source, which=which)
    pipeline = _pipeline_of(opened.kind, source, "exporting the encoder alone")
    if pipeline is None or opened.settings is None or opened.settings.head != "pretrain":
        return load_tensors(opened)
    settings = replace(opened.settings, head="embed", pooling=pipeline.pooling)
    return replace(load_tensors(replace(opened, settings=settings)), normalizes=pipeline.normalize)


def _pipeline_of(kind: Kind, source: str | Path, otherwise: str) -> SentencePipeline | None:
    """The pipeline of a sentence-transformers folder; None, with a warning, if bertrain does not compute it."""
    if kind == "run":
        return None
    try:
        return find_pipeline(locate(source))
    except UserError as error:
        warn(f"{error}; {otherwise}")
        return None


def _check_padding(pad_vocab_to: int) -> None:
    if pad_vocab_to not in WRITTEN_PADDINGS:
        paddings = ", ".join(map(str, WRITTEN_PADDINGS))
        raise UserError("bad-padding", f"--pad-vocab-to is {pad_vocab_to}; use one of {paddings}")


def _refuse_incomplete_encoder(weights: Weights) -> None:
    missing = [name for name in weights.missing if name.startswith(("embeddings.", "layers.", "final_norm."))]
    if not weights.tensors:
        names = list_names([*weights.left_over, *weights.skipped])
        raise UserError("no-bert-tensors", f"{weights.origin} has no tensor with a name as in BERT; it has {names}")
    if missing:
        thirds = list_names(list(weights.thirds))
        names = list_names(missing) + (f"; of query, key and value it has only {thirds}" if thirds else "")
        count = counted(len(missing), "tensor")
        raise UserError("missing-tensors", f"{weights.origin} lacks {count} of the encoder: {names}")
