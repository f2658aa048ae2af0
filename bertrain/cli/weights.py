"""The commands of `bertrain weights`."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from bertrain.cli.options import KNOWN_WEIGHTS, AnyWeights, AsJson, Checkpoint, NewFolder, new_app, printed_json

app = new_app("weights", "Import, export, show and compare weights: Hugging Face, TensorFlow 1, NVIDIA, ONNX.")


@app.command("import")
def weights_import(
    source: AnyWeights,
    out: NewFolder,
    config: Annotated[Path | None, Option(help="the model's bert_config.json; default: beside the weights")] = None,
    vocab: Annotated[
        Path | None, Option(help="vocabulary; default: vocab.txt or tokenizer.json beside the weights")
    ] = None,
    pad_vocab_to: Annotated[int, Option(help="pad the rows of the word embeddings to a multiple of 1, 8 or 64")] = 1,
    as_json: AsJson = False,
) -> None:
    """Convert weights into a Hugging Face folder, which all bertrain commands and many other programs read.

    Tensors are copied bit for bit in fp32, including the heads. It lists tensors that are missing, unknown, rounded,
    or part of an optimizer state.

    Example: bertrain weights import downloads/model.ckpt-28252 --out weights/mlperf
    """
    from bertrain.base.formatting import counted, few
    from bertrain.weights.export import import_weights

    done = import_weights(source, out, config=config, vocab=vocab, pad_vocab_to=pad_vocab_to)
    if printed_json(done, as_json):
        return
    step = "" if done.global_step is None else f" at step {done.global_step:,}"
    print(f"{done.folder}: {done.taken} tensors of {done.origin} ({done.kind}){step}")
    for kind, names in (("missing", done.missing), ("left over", done.left_over)):
        if names:
            shown = few(names)
            print(f"  {kind}: {shown}{' (each by its name with --json)' if shown.endswith('…') else ''}")
    if done.padding:
        print(f"  left out: {counted(done.padding, 'row')} after the vocabulary's, of padding")
    if done.rounded:
        print(f"  rounded from 64 bits to 32: {counted(len(done.rounded), 'tensor')} (each by its name with --json)")
    if done.skipped:
        counts = Counter(name.split("/")[-1].split(".")[-1] for name in done.skipped)
        kinds = ", ".join(f"{count} {name}" for name, count in counts.items())
        print(f"  skipped, not weights: {kinds} (each by its name with --json)")
    if done.lower_case is None:
        print("  no vocab.txt or tokenizer.json beside the weights and no --vocab: no tokenizer was written")
    else:
        print(f"  the vocabulary is {'uncased' if done.lower_case else 'cased'}")


@app.command("export")
def weights_export(
    source: AnyWeights,
    out: NewFolder,
    to: Annotated[str, Option(help="the format: huggingface, nvidia or onnx")] = "huggingface",
    pad_vocab_to: Annotated[
        int | None, Option(help="pad the vocabulary to a multiple of 1, 8 or 64; default: 8 for nvidia, else 1")
    ] = None,
    precision: Annotated[str | None, Option(help="fp32 or fp16, with onnx also int8; default: fp32")] = None,
    checkpoint: Checkpoint = "newest",
) -> None:
    """Write weights in a format that other programs load.

    An ONNX file is run in onnxruntime before it is kept, and compared with bertrain's own outputs.

    Example: bertrain weights export runs/tiny --to huggingface --out exported/tiny
    """
    from bertrain.weights.export import export
    from bertrain.weights.huggingface import LOADERS
    from bertrain.weights.sentence_transformers import MODULES
    from bertrain.weights.source import open_source

    made = export(source, out, to=to, which=checkpoint, pad_vocab_to=pad_vocab_to, precision=precision)
    if to == "onnx":
        print(f"{made}/model.onnx: load it with onnxruntime.InferenceSession; the folder has its tokenizer")
    elif to == "nvidia":
        print(f"{next(made.glob('*.pt'))}: give it to NVIDIA's run_pretraining.py as --init_checkpoint")
    else:
        written = open_source(made).settings
        assert written is not None
        loader = f"transformers.{LOADERS[written.head]}.from_pretrained"
        if (made / MODULES).is_file():
            loader = "sentence_transformers.SentenceTransformer"
        print(f"{made}: load it with {loader}")


@app.command("show")
def weights_show(source: AnyWeights, as_json: AsJson = False) -> None:
    """Describe weights: format, config, and tensors with their types, sizes and names in bertrain.

    Example: bertrain weights show downloads/model.ckpt-28252
    """
    from bertrain.weights.inspect import show_weights

    shown = show_weights(source)
    if printed_json(shown, as_json):
        return
    for tensor in shown.tensors:
        shape = "x".join(map(str, tensor.shape)) or "1"
        becomes = tensor.ours or ("skipped" if tensor.is_skipped else "no place here")
        print(f"{tensor.name}  {shape}  {tensor.dtype}  {tensor.nbytes:,} bytes  -> {becomes}")
    step = "" if shown.global_step is None else f", step {shown.global_step:,}"
    print(f"{shown.origin}: {shown.kind}{step}, {shown.parameters:,} parameters, {shown.nbytes:,} bytes")
    print(f"config: {json.dumps(shown.config) if shown.config else 'none beside it'}")
    if shown.head not in (None, "pretrain"):
        print(f"head: {shown.head}{', of ' + ', '.join(shown.labels) if shown.labels else ''}")
    print(f"vocabulary: {'none beside it' if shown.words is None else f'{shown.words:,} words'}")
    if shown.missing:
        print(f"missing: {', '.join(shown.missing)}")


@app.command("compare")
def weights_compare(
    a: Annotated[Path, Argument(metavar="A", help=KNOWN_WEIGHTS)],
    b: Annotated[Path, Argument(metavar="B", help="other weights, in any of these formats")],
    tolerance: Annotated[float, Option(help="largest difference at which two values count as the same")] = 0.0,
    as_json: AsJson = False,
) -> None:
    """Compare weights tensor by tensor, in any format; exit code 0 if they are the same, 1 if not.

    Example: bertrain weights compare runs/tiny exported/tiny
    """
    from bertrain.weights.inspect import compare_weights, is_same

    compared = compare_weights(a, b, tolerance=tolerance)
    same = is_same(compared)
    if not printed_json({"same": same, "tensors": compared}, as_json):
        others = [tensor for tensor in compared if tensor.verdict != "equal"]
        for tensor in others:
            sizes = ", of another shape" if tensor.verdict == "different" else ""
            if tensor.largest_absolute is not None:
                sizes = f", at most {tensor.largest_absolute:.3g} apart, {tensor.largest_relative:.3g} of the value"
            print(f"{tensor.name}: {tensor.verdict}{sizes}")
        verdict = "the same" if same else "different"
        print(f"{len(compared) - len(others)} of {len(compared)} tensors are equal; {verdict}")
    raise typer.Exit(0 if same else 1)
