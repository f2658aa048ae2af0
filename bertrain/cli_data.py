"""The verbs of `bertrain data`, each a thin skin over one Python function of `bertrain.data`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

data_app = typer.Typer(help="Make training data from text.", no_args_is_help=True, rich_markup_mode=None)

AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]
Inputs = Annotated[list[Path], typer.Argument(metavar="INPUT...", help="text files, or folders of them")]
NewFolder = Annotated[Path, typer.Option("--out", help="the folder to make")]
PreparedFolder = Annotated[Path, typer.Argument(metavar="DIR", help="a folder made by `bertrain data prepare`")]
LowerCase = Annotated[bool, typer.Option("--lower-case/--cased", help="fold case and accents, or keep them")]


@data_app.command("vocab")
def data_vocab(
    inputs: Inputs,
    out: Annotated[Path, typer.Option("--out", help="the vocabulary file to write")],
    size: Annotated[int, typer.Option(help="words and word pieces in it")] = 30522,
    lower_case: LowerCase = True,
) -> None:
    """Train a WordPiece vocabulary on your own text.

    Example: bertrain data vocab articles.txt --size 8000 --out vocab.txt
    """
    from bertrain.data.tokenizer import train_vocabulary

    vocabulary = train_vocabulary(inputs, out, size=size, lower_case=lower_case)
    print(f"{out}: {len(vocabulary.words):,} words; next: bertrain data prepare INPUT --vocab {out} --out DIR")


@data_app.command("prepare")
def data_prepare(
    inputs: Inputs,
    out: NewFolder,
    vocab: Annotated[Path | None, typer.Option(help="vocabulary, a word per line; default: BERT's uncased one")] = None,
    lower_case: LowerCase = True,
    max_seq_length: Annotated[int, typer.Option(help="longest example in tokens")] = 512,
    short_seq_prob: Annotated[float, typer.Option(help="share of documents cut into shorter examples")] = 0.1,
    seed: Annotated[int, typer.Option(help="seed of the pairing")] = 12345,
    rows_per_shard: Annotated[int, typer.Option(help="examples in one file")] = 65536,
) -> None:
    """Turn text (a sentence per line, a blank line between documents) into training examples.

    Example: bertrain data prepare articles.txt --out data/ --max-seq-length 128
    """
    from bertrain.data.prepare import prepare

    manifest = prepare(
        inputs,
        out,
        vocab=vocab,
        lower_case=lower_case,
        max_seq_length=max_seq_length,
        short_seq_prob=short_seq_prob,
        seed=seed,
        rows_per_shard=rows_per_shard,
    )
    mean = manifest["tokens"] / manifest["rows"]
    print(f"{out}: {manifest['rows']:,} examples, {mean:.1f} tokens each, in {len(manifest['files'])} file(s)")
    print(f"next: bertrain pretrain RECIPE --data {out} --run runs/NAME")


@data_app.command("stats")
def data_stats(
    folder: PreparedFolder,
    ranks: Annotated[int, typer.Option(help="ranks to share the work")] = 8,
    sequences: Annotated[int, typer.Option(help="examples in a step")] = 256,
    token_budget: Annotated[int, typer.Option(help="tokens in a bin; 0: a rank's share of a step")] = 0,
    group_size: Annotated[int, typer.Option(min=0, help="ranks dealt to together by exchange; 0: all")] = 0,
    plot: Annotated[Path | None, typer.Option(help="draw lengths and policies into this .svg file")] = None,
    as_json: AsJson = False,
) -> None:
    """Count what a prepared folder holds, and compare the batching policies on it.

    Example: bertrain data stats data/ --ranks 8 --sequences 768
    """
    from dataclasses import asdict

    from bertrain.data.stats import data_stats as describe

    stats = describe(
        folder, ranks=ranks, sequences=sequences, token_budget=token_budget, group_size=group_size, plot=plot
    )
    if as_json:
        print(json.dumps(asdict(stats)))
        return
    print(f"{folder}: {stats.examples:,} examples, {stats.tokens:,} tokens, vocabulary of {stats.vocabulary:,} words")
    print(f"length: mean {stats.mean_length:.1f}, median {stats.median_length:.0f}, longest {stats.longest}")
    print(f"next sentence drawn at random: {stats.random_next_share:.1%}; words unknown: {stats.unknown_share:.2%}")
    most = max(stats.histogram.values())
    for length, count in stats.histogram.items():
        print(f"  up to {length:>4} {count:>10,} {'#' * round(40 * count / most)}")
    print(f"steps of {sequences} examples on {ranks} ranks (imbalance: the busiest rank over the mean)")
    print(f"  {'policy':<9}{'padding':>9}{'bins':>7}{'tokens':>9}{'attention':>11}")
    for one in stats.policies:
        fractions = f"{one.token_imbalance:>9.3f}{one.attention_imbalance:>11.3f}"
        print(f"  {one.policy:<9}{one.padding:>9.1%}{one.bins_per_step:>7.1f}{fractions}")
    if plot is not None:
        print(f"drawn: {plot}")


@data_app.command("pack")
def data_pack(
    folder: Annotated[Path | None, typer.Argument(metavar="[DIR]", help="a folder made by `data prepare`")] = None,
    lengths: Annotated[
        Path | None, typer.Option(help="instead of a folder: a CSV file with the columns length and sequences")
    ] = None,
    algorithm: Annotated[
        Literal["lpfhp", "spfhp", "nnlshp"],
        typer.Option(help="longest pack first, shortest pack first, or non-negative least squares"),
    ] = "lpfhp",
    max_per_row: Annotated[int, typer.Option(help="most sequences in a row; 0: 3 for nnlshp, else all that fit")] = 0,
    row_length: Annotated[int, typer.Option(min=0, help="tokens in a row; 0: as the longest sequence")] = 0,
    as_json: AsJson = False,
) -> None:
    """Pack sequences into rows of one length, and say how full they are.

    Example: bertrain data pack data/ --algorithm lpfhp
    """
    from dataclasses import asdict

    from bertrain.data.pack import pack

    stats = pack(folder, lengths=lengths, algorithm=algorithm, max_per_row=max_per_row, row_length=row_length)
    if as_json:
        print(json.dumps(asdict(stats)))
        return
    print(f"{stats.sequences:,} sequences of {stats.tokens / stats.sequences:.1f} tokens on average")
    print(
        f"{stats.algorithm}: {stats.rows:,} rows of {stats.row_length}, {stats.efficiency:.3%} full, up to "
        f"{stats.most_per_row} sequences each, in {stats.strategies:,} kinds; {stats.seconds:.3f} s"
    )
    print(f"unpacked, one sequence to a row: {stats.sequences:,} rows, {stats.unpacked:.3%} full")
