"""The verbs of `bertrain weights`, each a thin skin over one Python function of `bertrain.weights`."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from bertrain.cli.data import AsJson, NewFolder

weights_app = typer.Typer(
    help="Weights in and out: Hugging Face, TensorFlow 1, NVIDIA.", no_args_is_help=True, rich_markup_mode=None
)

WHAT_IS_KNOWN = "a run, a Hugging Face folder, a TensorFlow 1 checkpoint, or a .pt, .bin or .safetensors file"
Checkpoint = Annotated[str, typer.Option("--checkpoint", help="newest, best, or the number of a step")]
AnyWeights = Annotated[Path, typer.Argument(metavar="RUN_OR_WEIGHTS", help=WHAT_IS_KNOWN)]


@weights_app.command("import")
def weights_import(
    source: AnyWeights,
    out: NewFolder,
    config: Annotated[
        Path | None, typer.Option(help="the model's bert_config.json; default: the one beside the weights")
    ] = None,
    vocab: Annotated[
        Path | None, typer.Option(help="its vocabulary; default: the vocab.txt or tokenizer.json beside them")
    ] = None,
    pad_vocab_to: Annotated[
        int, typer.Option(help="pad the vocabulary with words that are never predicted: 1 (not), 8 or 64")
    ] = 1,
    as_json: AsJson = False,
) -> None:
    """Turn somebody's weights into a Hugging Face folder, which every verb here takes, and other programs too.

    Tensors are copied bit for bit in fp32, with the heads that are there. What was missing, had no place, was rounded
    or was an optimizer's is named.

    Example: bertrain weights import downloads/model.ckpt-28252 --out weights/mlperf
    """
    from bertrain.base.formatting import counted
    from bertrain.weights.export import import_weights

    done = import_weights(source, out, config=config, vocab=vocab, pad_vocab_to=pad_vocab_to)
    if as_json:
        print(json.dumps(asdict(done)))
        return
    step = "" if done.global_step is None else f" at step {done.global_step:,}"
    print(f"{done.folder}: {done.taken} tensors of {done.origin} ({done.kind}){step}")
    for kind, names in (("missing", done.missing), ("left over", done.left_over)):
        if names:
            print(f"  {kind}: {', '.join(names)}")
    if done.padding:
        print(f"  left out: {counted(done.padding, 'row')} after the vocabulary's, which are padding")
    if done.rounded:
        print(f"  rounded from 64 bits to 32: {counted(len(done.rounded), 'tensor')} (each by its name with --json)")
    if done.skipped:
        counts = Counter(name.split("/")[-1].split(".")[-1] for name in done.skipped)
        kinds = ", ".join(f"{count} {name}" for name, count in counts.items())
        print(f"  skipped, since they are no weights: {kinds} (each by its name with --json)")
    if done.lower_case is None:
        print(
            "  no vocabulary lay beside them (vocab.txt or tokenizer.json) or came as --vocab: no tokenizer was written"
        )
    else:
        print(f"  the vocabulary is {'uncased' if done.lower_case else 'cased'}")


@weights_app.command("export")
def weights_export(
    source: AnyWeights,
    out: NewFolder,
    to: Annotated[str, typer.Option(help="the format: huggingface or nvidia")] = "huggingface",
    pad_vocab_to: Annotated[
        int | None, typer.Option(help="pad the vocabulary: 1 (not), 8 or 64; default: 8 for nvidia, 1 otherwise")
    ] = None,
    checkpoint: Checkpoint = "newest",
) -> None:
    """Hand weights over in a form that others load.

    Example: bertrain weights export runs/tiny --to huggingface --out exported/tiny
    """
    from bertrain.weights.export import export
    from bertrain.weights.huggingface import LOADERS
    from bertrain.weights.source import open_source

    made = export(source, out, to=to, which=checkpoint, pad_vocab_to=pad_vocab_to)
    if to == "nvidia":
        print(f"{next(made.glob('*.pt'))}: give it to NVIDIA's run_pretraining.py as --init_checkpoint")
    else:
        written = open_source(made).settings
        assert written is not None
        print(f"{made}: load it with transformers.{LOADERS[written.head]}.from_pretrained")


@weights_app.command("show")
def weights_show(source: AnyWeights, as_json: AsJson = False) -> None:
    """Say what weights these are: form, config, tensors with their types and sizes, and their names here.

    Example: bertrain weights show downloads/model.ckpt-28252
    """
    from bertrain.weights.inspect import show_weights

    shown = show_weights(source)
    if as_json:
        print(json.dumps(asdict(shown)))
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


@weights_app.command("compare")
def weights_compare(
    a: Annotated[Path, typer.Argument(metavar="A", help=WHAT_IS_KNOWN)],
    b: Annotated[Path, typer.Argument(metavar="B", help="the same")],
    tolerance: Annotated[float, typer.Option(help="how far apart two values may be and still count as the same")] = 0.0,
    as_json: AsJson = False,
) -> None:
    """Compare weights tensor by tensor, whatever form each is in; exit code 0 if they are the same, 1 if not.

    Example: bertrain weights compare runs/tiny exported/tiny
    """
    from bertrain.weights.inspect import compare_weights, is_same

    compared = compare_weights(a, b, tolerance=tolerance)
    same = is_same(compared)
    if as_json:
        print(json.dumps({"same": same, "tensors": [asdict(tensor) for tensor in compared]}))
    else:
        others = [tensor for tensor in compared if tensor.verdict != "equal"]
        for tensor in others:
            sizes = (
                (", of another shape" if tensor.verdict == "different" else "")
                if tensor.largest_absolute is None
                else f", at most {tensor.largest_absolute:.3g} apart, {tensor.largest_relative:.3g} of the value"
            )
            print(f"{tensor.name}: {tensor.verdict}{sizes}")
        print(
            f"{len(compared) - len(others)} of {len(compared)} tensors are equal; {'the same' if same else 'different'}"
        )
    raise typer.Exit(0 if same else 1)
