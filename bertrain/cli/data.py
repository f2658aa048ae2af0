"""The commands of `bertrain data`."""

from __future__ import annotations

import functools
import os
import re
import sys
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

from typer import Argument, Option

from bertrain.base.formatting import counted
from bertrain.cli import options
from bertrain.cli.options import ENCODING, TEXT_COLUMN, AsJson, NewFolder, new_app, printed_json
from bertrain.config.choices import (
    MAX_PER_ROW,
    PACKING,
    Algorithm,
    Collection,
    DocumentEnd,
    Engine,
    Form,
    OnError,
    Splitter,
    Target,
)

app = new_app("data", "Prepare training data, and convert it between formats.")

Inputs = Annotated[list[Path], Argument(metavar="INPUT...", help="text files, or folders of them")]
AnyFolder = Annotated[Path, Argument(metavar="DIR", help="data in any format: a folder, or one HDF5 or TFRecord file")]
VocabularyFile = Annotated[
    Path | None,
    Option(
        "--vocab", help="vocabulary file of HDF5 or TFRecord data; default: the one beside it, or BERT's uncased one"
    ),
]
ShardCount = Annotated[int, Option("--shards", min=0, help="files to write; 0: one for each 65,536 rows")]
MaskSeed = Annotated[int, Option("--seed", help="seed of packing, and of masks if the rows have none")]
MaxPredictions = Annotated[int, Option(min=0, help="most masked words in a row; 0: as in the data, or 15 % of the row")]
LowerCase = Annotated[bool, Option("--lower-case/--cased", help="remove case and accents, or keep them")]
Workers = Annotated[
    int | None, Option(help="worker processes; default: the CPU cores, at most 8; any number gives the same result")
]


@app.command("download")
def data_download(
    what: Annotated[Collection, Argument(metavar="WHAT", help="wikipedia, or mlperf")],
    out: Annotated[Path, Option("--out", help="the folder to download into; existing files are verified")],
    mirror: Annotated[str | None, Option(help="address to use instead of the public host")] = None,
    language: Annotated[str, Option(help="language of Wikipedia, as in its address: en, de, simple")] = "en",
    date: Annotated[str, Option(help="date of the Wikipedia dump: latest, or YYYYMMDD")] = "latest",
    as_json: AsJson = False,
) -> None:
    """Download a Wikipedia dump, or MLPerf's text, checkpoint, configuration and vocabulary.

    If the command is interrupted, run it again to continue. A file gets its name only after its MD5 is verified.

    Example: bertrain data download wikipedia --language simple --out dumps/
    """
    from bertrain.data.text.download import download

    made = download(what, out, mirror=mirror, language=language, date=date)
    if printed_json(made, as_json):
        return
    fetched = counted(len(made["fetched"]), "file")
    print(f"{out}: {fetched} downloaded, {len(made['already_there'])} there already, all verified")
    for name in made["left_out"]:
        print(f"  left out, since nothing needs it: {name}")
    if what == "wikipedia":
        print(f"next: bertrain data extract {quote(str(out))} --out DIR")


@app.command("extract")
def data_extract(
    inputs: Annotated[
        list[Path], Argument(metavar="INPUT...", help="files or folders; .gz, .bz2, .xz, .zst and .tar are unpacked")
    ],
    out: NewFolder,
    form: Annotated[Form, Option("--format", help="format of the inputs; auto: detected from their content")] = "auto",
    text_column: Annotated[str, Option(help=TEXT_COLUMN)] = "auto",
    encoding: Annotated[str, Option(help=ENCODING)] = "auto",
    document_end: Annotated[
        DocumentEnd,
        Option(help="end of a document in plain text; size: the first blank line after 8 kB; auto: detected"),
    ] = "auto",
    wrapped: Annotated[
        bool | None, Option(help="join the lines of a paragraph; default: detected; yes for --document-end file")
    ] = None,
    sentences: Annotated[
        Splitter, Option(help="how to split sentences. sentencex: by rules; lines: one per line; none: not at all")
    ] = "sentencex",
    language: Annotated[str, Option(help="language for splitting sentences; auto: detected")] = "auto",
    min_characters: Annotated[int, Option(help="skip documents with fewer characters")] = 0,
    deduplicate: Annotated[
        bool, Option("--deduplicate", help="drop duplicates; needs 100 bytes of memory per document")
    ] = False,
    hold_out: Annotated[float, Option(help="documents to hold out for evaluation; below 1: a share")] = 0,
    hold_out_seed: Annotated[int, Option(help="seed for choosing the held-out documents")] = 12345,
    on_error: Annotated[
        OnError,
        Option(help="at damaged input. stop: refuse it; skip: continue without it, and keep the pages before it"),
    ] = "stop",
    part_bytes: Annotated[int, Option(help="approximate size of one output file")] = 27_000_000,
    workers: Workers = None,
    as_json: AsJson = False,
) -> None:
    """Extract text, a sentence per line, from Wikipedia dumps, WikiExtractor output, tables or plain text.

    From a dump it keeps the running text of articles, without tables, templates, references and lists.

    Example: bertrain data extract enwiki-latest-pages-articles-multistream.xml.bz2 --out text/ --workers 16
    """
    from bertrain.data.text.documents import EXTRACT_TRAINING
    from bertrain.data.text.extract import EVALUATION, extract

    made = extract(
        inputs, out, form=form, text_column=text_column, encoding=encoding, document_end=document_end, wrapped=wrapped,
        sentences=sentences, language=language, min_characters=min_characters, deduplicate=deduplicate,
        hold_out=hold_out, hold_out_seed=hold_out_seed, on_error=on_error, part_bytes=part_bytes,
        workers=_workers(workers),
    )  # fmt: skip
    if printed_json(made, as_json):
        return
    for problem in made["problems"]:
        print(f"skipped: {problem}", file=sys.stderr)
    counts = made["counts"]
    parts = sum(file["name"] != EVALUATION for file in made["files"])
    print(f"{out}: {counts['documents']:,} documents, {counts['sentences']:,} sentences, in {counted(parts, 'file')}")
    for reason, count in made["skipped"].items():
        print(f"  left out: {count:,} {reason}")
    if counts["held_out"]:
        print(f"  of these held out in {out / EVALUATION}: {counts['held_out']:,} documents")
    print(f"next: bertrain data prepare {quote(str(out / EXTRACT_TRAINING))} --out DIR")
    if counts["held_out"]:
        print(f"and:  bertrain data prepare {quote(str(out / EVALUATION))} --out HELD-OUT")


def _workers(workers: int | None) -> int:
    return min(8, len(os.sched_getaffinity(0))) if workers is None else workers


@app.command("vocab")
def data_vocab(
    inputs: Inputs,
    out: Annotated[Path, Option("--out", help="the vocabulary file to write")],
    size: Annotated[int, Option(help="vocabulary size: words and word pieces")] = 30522,
    lower_case: LowerCase = True,
    as_json: AsJson = False,
) -> None:
    """Train a WordPiece vocabulary on your own text.

    Example: bertrain data vocab articles.txt --size 8000 --out vocab.txt
    """
    from bertrain.data.text.vocabulary_training import train_vocabulary

    is_there = out.exists()
    vocabulary = train_vocabulary(inputs, out, size=size, lower_case=lower_case)
    facts = {"size": len(vocabulary.words), "lower_case": lower_case, "sha256": vocabulary.hash}
    if printed_json({"file": str(out)} | facts, as_json):
        return
    replaced = ", in place of what was there" if is_there else ""
    following = f"bertrain data prepare INPUT --vocab {quote(str(out))} --out DIR"
    print(f"{out}: {len(vocabulary.words):,} words{replaced}; next: {following}")


@app.command("prepare")
def data_prepare(
    inputs: Inputs,
    out: NewFolder,
    vocab: Annotated[
        Path | None, Option(help="vocabulary, a word per line, or a tokenizer.json; default: BERT's uncased one")
    ] = None,
    lower_case: Annotated[
        bool | None,
        Option("--lower-case/--cased", help="remove case and accents, or keep them; default: as in --vocab"),
    ] = None,
    max_seq_length: Annotated[int, Option(help="longest example in tokens")] = 512,
    short_seq_prob: Annotated[
        float | None,
        Option(help="share of documents cut into shorter examples; default: 0.1; not with --full-sentences"),
    ] = None,
    dupe_factor: Annotated[int, Option(help="passes over the text, each with new random choices")] = 1,
    seed: Annotated[int, Option(help="seed of all random choices")] = 12345,
    full_sentences: Annotated[
        bool, Option("--full-sentences", help="rows of whole sentences instead of pairs, for --model.nsp false")
    ] = False,
    reference: Annotated[bool, Option("--reference", help="write exactly the masked rows of MLPerf's script")] = False,
    per_file: Annotated[
        bool, Option("--per-file", help="with --reference: as if the script ran once per file")
    ] = False,
    max_predictions: Annotated[
        int | None, Option(help="most masked words in an example: with --reference (76), or for `data convert`")
    ] = None,
    masked_lm_prob: Annotated[
        float | None, Option(help="share of words to mask: with --reference (0.15), or for `data convert`")
    ] = None,
    rows_per_shard: Annotated[int, Option(help="most examples in one file")] = 65536,
    unit_mb: Annotated[
        float, Option(help="MB of text in a unit of work; random second segments come from the same unit")
    ] = 16,
    workers: Workers = None,
    engine: Annotated[Engine, Option(help="local: this machine; dask: a cluster (needs the extra `dask`)")] = "local",
    scheduler: Annotated[
        str | None, Option(help="address of the Dask scheduler; under `launch`, the ranks are scheduler and workers")
    ] = None,
    on_error: Annotated[
        OnError, Option(help="at unreadable files, lines or bytes. stop: refuse them; skip: leave them out")
    ] = "stop",
    dry_run: Annotated[bool, Option("--dry-run", help="check everything and write nothing")] = False,
    as_json: AsJson = False,
) -> None:
    """Turn text (a sentence per line, a blank line between documents) into training examples.

    The result is the same for any --workers and --engine. If it is interrupted, the same command continues.

    Example: bertrain data prepare articles.txt --out data/ --max-seq-length 128
    """
    from bertrain.data.prepare.prepare import prepare
    from bertrain.data.text.progress import unit_progress
    from bertrain.launch.dask_workers import dask_scheduler

    make = functools.partial(
        prepare, inputs, out, vocab=vocab, lower_case=lower_case, max_seq_length=max_seq_length,
        short_seq_prob=short_seq_prob, dupe_factor=dupe_factor, seed=seed, full_sentences=full_sentences,
        reference=reference, per_file=per_file, max_predictions=max_predictions, masked_lm_prob=masked_lm_prob,
        rows_per_shard=rows_per_shard, unit_mb=unit_mb, workers=_workers(workers), engine=engine, on_error=on_error,
    )  # fmt: skip
    if dry_run or options.is_launched():
        found = make(scheduler=scheduler, dry_run=True)
        if not dry_run:
            options.start_ranks(1, runs=[out], data=inputs)
        if printed_json({name: found[name] for name in ("files", "units")}, as_json):
            return
        print(f"{counted(found['files'], 'file')}, {counted(found['units'], 'unit')} of work; nothing was written")
        return
    with dask_scheduler(engine, scheduler) as address:
        if address is None and engine == "dask":
            return  # this rank has worked for the first one
        manifest = make(scheduler=address, progress=unit_progress())
    facts = {name: manifest[name] for name in ("rows", "tokens", "masks", "preparation")}
    if printed_json({"folder": str(out), "files": len(manifest["files"])} | facts, as_json):
        return
    mean = manifest["tokens"] / manifest["rows"]
    files = counted(len(manifest["files"]), "file")
    print(f"{out}: {manifest['rows']:,} examples, {mean:.1f} tokens each, in {files}")
    _print_losses(manifest["preparation"], max_seq_length)
    if lower_case is None and vocab is not None and (out / "vocab.txt").is_file():  # a tokenizer.json has its own rule
        kept = "were folded: the vocabulary has neither" if manifest["vocabulary"]["lower_case"] else "were kept"
        print(f"case and accents {kept}; --lower-case or --cased overrides it")
    nsp = " --model.nsp false" if full_sentences else ""
    is_held_out = all(re.match("eval|held|valid|dev|test", path.name) for path in inputs)
    data = f"DIR --evaluate.data {quote(str(out))}" if is_held_out else quote(str(out))
    print(f"next: bertrain pretrain RECIPE --data {data} --run runs/NAME{nsp}")


def _print_losses(preparation: dict[str, Any], max_seq_length: int) -> None:
    """Print what of the text was cut or left out."""
    text = preparation["text"]
    share = text["unknown_tokens"] / text["tokens"]
    if share > 0.01:
        print(f"{share:.1%} of the words are not in the vocabulary ([UNK])")
    for name, what in (
        ("sentences_longer_than_an_example", f"sentences cut because they exceed {max_seq_length} tokens"),
        ("lines_not_utf8", "lines from which bytes that are not UTF-8 were left out"),
        ("lines_skipped", "lines skipped because they are too long to be sentences"),
    ):
        if text.get(name):
            print(f"{what}: {text[name]:,}")
    for name in preparation.get("skipped_inputs", ()):
        print(f"skipped {name}: it could not be read as text")


@app.command("mlperf")
def data_mlperf(
    out: Annotated[Path, Option("--out", help="the folder to create; if interrupted, run again to continue")],
    packed: Annotated[bool, Option("--packed", help="also write packed shards (NNLSHP, three per row)")] = False,
    skip_download: Annotated[
        bool, Option("--skip-download", help="use the text and vocabulary in OUT/download/results4 and OUT/phase1")
    ] = False,
    mirror: Annotated[str | None, Option(help="address to use instead of MLCommons'")] = None,
    shards: Annotated[int, Option(min=1, help="files of training data")] = 4320,
    eval_count: Annotated[int, Option(min=1, help="examples to pick for evaluation")] = 10_000,
    max_seq_length: Annotated[int, Option(help="512, or 128 into OUT/length-128")] = 512,
    needed_only: Annotated[bool, Option("--needed-only", help="leave out 1.1 TB that training does not read")] = False,
    intermediate: Annotated[
        bool,
        Option("--intermediate", help="also write per_seqlen_parts and .lst files, which only NVIDIA's steps read"),
    ] = False,
    convert_checkpoint: Annotated[
        bool, Option("--convert-checkpoint", help="also write phase1/model.ckpt-28252.pt, for NVIDIA's own trainer")
    ] = False,
    workers: Annotated[int, Option(min=1, help="worker processes")] = 1,
    as_json: AsJson = False,
) -> None:
    """Prepare MLPerf's BERT data in one command: download, examples, shards, shuffle, evaluation set, checksums.

    Folders and file names are those of NVIDIA's prepare_data.

    Example: bertrain data mlperf --out bert_data/ --packed --needed-only --workers 16
    """
    from bertrain.mlperf.data import mlperf_data

    made = mlperf_data(
        out, packed=packed, skip_download=skip_download, mirror=mirror, shards=shards, eval_count=eval_count,
        max_seq_length=max_seq_length, needed_only=needed_only, intermediate=intermediate,
        convert_checkpoint=convert_checkpoint, workers=workers,
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )  # fmt: skip
    if printed_json(made, as_json):
        return
    for place, what in made["stages"].items():
        print(f"{place}: {what}")
    compared = made["checksums_compared"]
    print(f"{compared} known checksums agree" if compared else "other text than MLPerf's: no checksum is known for it")


@app.command("convert")
def data_convert(
    folder: AnyFolder,
    to: Annotated[Target, Option("--to", help="the format to write")],
    out: NewFolder,
    shards: ShardCount = 0,
    shuffle_seed: Annotated[int | None, Option(help="shuffle all rows with this seed; default: keep the order")] = None,
    seed: MaskSeed = 12345,
    max_seq_length: Annotated[int, Option(min=0, help="row length in tokens; 0: as in the data")] = 0,
    max_predictions: MaxPredictions = 0,
    packing: Annotated[Algorithm, Option(help="packing algorithm for hdf5-packed; see `data pack`")] = PACKING,
    max_per_row: Annotated[
        int, Option(min=0, help="hdf5-packed: most examples in a row; 0: 3 for nnlshp, else all that fit")
    ] = MAX_PER_ROW,
    vocab: VocabularyFile = None,
    as_json: AsJson = False,
) -> None:
    """Convert data to another format: Arrow, or MLPerf's HDF5 and TFRecord, which other trainers read.

    Example: bertrain data convert data/ --to hdf5-varlength --shards 4320 --shuffle-seed 24 --out hdf5/
    """
    from bertrain.data.formats.convert import convert

    written = convert(
        folder, out, to=to, shards=shards, shuffle_seed=shuffle_seed, seed=seed, max_seq_length=max_seq_length,
        max_predictions=max_predictions, packing=packing, max_per_row=max_per_row, vocab=vocab,
    )  # fmt: skip
    if not printed_json(written, as_json):
        print(written.sentence())


@app.command("bin")
def data_bin(
    folder: AnyFolder,
    out: NewFolder,
    to: Annotated[Target, Option("--to", help="the format to write")] = "hdf5-fixed",
    shards: ShardCount = 0,
    seed: MaskSeed = 12345,
    max_predictions: MaxPredictions = 0,
    vocab: VocabularyFile = None,
    as_json: AsJson = False,
) -> None:
    """Sort examples by length into the folders 128, 256, 384 and 512.

    Example: bertrain data bin data/ --shards 2048 --out binned/
    """
    from bertrain.data.formats.convert import bin_by_length

    written = bin_by_length(folder, out, to=to, shards=shards, seed=seed, max_predictions=max_predictions, vocab=vocab)
    if printed_json(written, as_json):
        return
    for one in written.values():
        print(one.sentence())


@app.command("pack")
def data_pack(
    folder: Annotated[
        Path | None, Argument(metavar="[DIR]", help="data in any format: a folder, or one HDF5 or TFRecord file")
    ] = None,
    out: Annotated[Path | None, Option(help="write the packed rows here, as hdf5-packed; default: only report")] = None,
    lengths: Annotated[Path | None, Option(help="instead of data: a CSV file of columns length and sequences")] = None,
    algorithm: Annotated[
        Algorithm, Option(help="lpfhp, spfhp: longest or shortest pack first; nnlshp: non-negative least squares")
    ] = "lpfhp",
    max_per_row: Annotated[int, Option(min=0, help="most sequences in a row; 0: 3 for nnlshp, else all that fit")] = 0,
    row_length: Annotated[int, Option(min=0, help="row length in tokens; 0: the longest sequence")] = 0,
    shards: ShardCount = 0,
    seed: MaskSeed = 12345,
    vocab: VocabularyFile = None,
    as_json: AsJson = False,
) -> None:
    """Pack sequences into rows of one length and report how full they are; with --out, write them.

    Example: bertrain data pack data/ --algorithm lpfhp --out packed/
    """
    from bertrain.data.formats.pack import pack

    stats = pack(
        folder, out, lengths=lengths, algorithm=algorithm, max_per_row=max_per_row, row_length=row_length,
        shards=shards, seed=seed, vocab=vocab,
    )  # fmt: skip
    if printed_json(stats, as_json):
        return
    print(f"{stats.sequences:,} sequences of {stats.tokens / stats.sequences:.1f} tokens on average")
    print(
        f"{stats.algorithm}: {stats.rows:,} rows of {stats.row_length}, {stats.efficiency:.3%} full, up to "
        f"{stats.most_per_row} sequences each, in {stats.strategies:,} kinds; {stats.seconds:.3f} s"
    )
    print(f"unpacked, one sequence to a row: {stats.sequences:,} rows, {stats.unpacked:.3%} full")
    if stats.written is not None:
        print(stats.written.sentence())


@app.command("eval-set")
def data_eval_set(
    folder: AnyFolder,
    out: NewFolder,
    count: Annotated[int, Option(min=1, help="examples to pick, evenly spaced")] = 10000,
    to: Annotated[Target | None, Option("--to", help="the format to write; default: that of DIR")] = None,
    seed: MaskSeed = 12345,
    vocab: VocabularyFile = None,
    as_json: AsJson = False,
) -> None:
    """Pick evenly spaced examples for evaluation, as MLPerf's reference does.

    Example: bertrain data eval-set held-out/ --count 10000 --out eval/
    """
    from bertrain.data.formats.convert import eval_set

    written = eval_set(folder, out, count=count, to=to, seed=seed, vocab=vocab)
    if not printed_json(written, as_json):
        print(written.sentence())


@app.command("stats")
def data_stats(
    folder: AnyFolder,
    ranks: Annotated[int, Option(help="number of ranks")] = 8,
    sequences: Annotated[int, Option(help="examples in a step")] = 256,
    token_budget: Annotated[int, Option(help="tokens in a bin; 0: a rank's share of a step")] = 0,
    vocab: VocabularyFile = None,
    plot: Annotated[Path | None, Option(help="plot lengths and policies into this .svg file")] = None,
    as_json: AsJson = False,
) -> None:
    """Print statistics of a data folder, and compare the batching policies on it.

    Example: bertrain data stats data/ --ranks 8 --sequences 768
    """
    from bertrain.data.feed.stats import data_stats as describe
    from bertrain.reports.data_plots import plot_stats
    from bertrain.reports.page import check_plot

    if plot is not None:
        check_plot(plot)
    stats = describe(folder, ranks=ranks, sequences=sequences, token_budget=token_budget, vocab=vocab)
    if plot is not None:
        plot_stats(stats, plot, vocab=vocab)
    if printed_json(stats, as_json):
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
        print(f"plot: {plot}")


@app.command("inspect")
def data_inspect(
    folder: AnyFolder,
    rows: Annotated[str, Option(help="which rows: FIRST:END")] = "0:5",
    vocab: VocabularyFile = None,
    as_json: AsJson = False,
) -> None:
    """Show examples as words: both segments, and each masked word as SHOWN=ORIGINAL; in color on a terminal.

    Example: bertrain data inspect data/ --rows 0:5
    """
    from bertrain.data.formats.inspect import inspect_data, lines_of

    shown = inspect_data(folder, rows=rows, vocab=vocab)
    if printed_json(shown, as_json):
        return
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    for example in shown:
        for line in lines_of(example):
            console.print(line)


@app.command("verify")
def data_verify(
    folder: AnyFolder,
    checksums: Annotated[Path | None, Option(help="MLPerf's row checksums: a file's name and an MD5 per line")] = None,
    as_json: AsJson = False,
) -> None:
    """Verify the hash of every file, or the checksums of its rows.

    Example: bertrain data verify hdf5/ --checksums 4320_shards_varlength.chk
    """
    from bertrain.data.formats.verify import verify

    verified = verify(folder, checksums=checksums)
    if not printed_json(verified, as_json):
        print(verified.sentence())
