"""`bertrain data convert`, `bin` and `eval-set`: examples of any layout into any other.

Every layout is read by row number, so the commands differ only in the order of rows: unchanged, shuffled, by length,
or evenly strided. Orders are computed, and rows read, a chunk at a time. Packing and sorting by length take a few
numbers for each row. A file of any layout but TFRecord is built in memory, so one that does not fit is refused first.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from bertrain.base.errors import UserError
from bertrain.base.files import new_folder, refuse_occupied
from bertrain.base.formatting import GIB, counted
from bertrain.base.machine import free_memory
from bertrain.base.seeds import derive, permute
from bertrain.config.choices import MASK_PROBABILITY, MAX_PER_ROW, PACKING, Algorithm, Target
from bertrain.data.formats import hdf5, tfrecord
from bertrain.data.formats.block import Block, concatenate, draw_masks
from bertrain.data.formats.layouts import Fields, Shape, to_fixed, to_packed, to_varlength
from bertrain.data.formats.masking import Ints, MaskingRules
from bertrain.data.formats.packing import Packing, plan_packing
from bertrain.data.formats.shards import VOCABULARY, Shards
from bertrain.data.formats.source import DataSource, open_data
from bertrain.data.formats.write import narrow, write_blocks

Order = Callable[[Ints], Ints]  # maps positions in the result to rows of the source

ROWS_AT_ONCE = 1024
ROWS_PER_SHARD = 65536
LENGTH_BINS = (128, 256, 384, 512)


@dataclass(frozen=True)
class Conversion:
    """The data written: `records` are packs where `layout` is packed, else rows."""

    folder: str
    layout: str
    rows: int
    records: int
    files: int
    max_seq_length: int
    max_predictions: int
    masks: Literal["kept", "drawn", "none"]  # kept from the source, drawn here, or none: the rows are unmasked

    def sentence(self) -> str:
        packs = f" in {self.records:,} packs" if self.layout == "hdf5-packed" else ""
        masks = {
            "kept": f"masks kept, at most {self.max_predictions} per row",
            "drawn": f"masks drawn as in training, at most {self.max_predictions} per row",
            "none": "unmasked",
        }[self.masks]
        width = f"rows up to {self.max_seq_length} tokens"
        files = counted(self.files, "file")
        return f"{self.folder}: {self.layout}, {self.rows:,} rows{packs} in {files}, {width}, {masks}"


@dataclass(frozen=True)
class ConversionPlan:
    source: DataSource
    to: Target
    shape: Shape
    masking: MaskingRules | None  # how to mask unmasked rows; None where the rows keep what they have
    seed: int
    shards: int
    packing: Algorithm = PACKING
    max_per_row: int = MAX_PER_ROW
    with_lists: bool = False  # beside each file of rows or packs a list of the source's rows in it, in JSON

    @property
    def has_masks(self) -> bool:
        return self.source.predictions is not None or self.masking is not None


def convert(
    folder: str | Path,
    out: str | Path,
    *,
    to: Target,
    shards: int = 0,
    shuffle_seed: int | None = None,
    seed: int = 12345,
    max_seq_length: int = 0,
    max_predictions: int = 0,
    packing: Algorithm = PACKING,
    max_per_row: int = MAX_PER_ROW,
    vocab: str | Path | None = None,
    with_lists: bool = False,
) -> Conversion:
    """Write all rows of a data folder in another layout, in their order or shuffled by `shuffle_seed`.

    `shards` is the number of files (0: one for every 65,536 rows); their sizes differ by at most one row. Padded rows
    have the width of the source, or `max_seq_length` and `max_predictions`. For layouts of masked rows, unmasked rows
    are masked as in training, once, from `seed`. For hdf5-packed, `packing` is the algorithm and `max_per_row` the
    maximum examples per pack (0: 3 for nnlshp, else all that fit). `with_lists` writes beside each file which rows it
    has.
    """
    if to != "hdf5-packed" and (packing, max_per_row) != (PACKING, MAX_PER_ROW):
        raise UserError(
            "option-without-effect", f"--packing and --max-per-row need --to hdf5-packed, not {to}; leave them out"
        )
    source = open_data(folder, vocab=vocab)
    plan = _plan(source, to, shards, seed, max_seq_length, max_predictions)
    plan = replace(plan, packing=packing, max_per_row=max_per_row, with_lists=with_lists)
    order: Order = _unchanged
    if shuffle_seed is not None:
        order = partial(permute, size=len(source), key=derive(shuffle_seed, "convert"))
    return _write_folder(plan, order, len(source), Path(out))


def convert_into(
    folder: str | Path,
    out: str | Path,
    *,
    to: Literal["hdf5-fixed", "hdf5-varlength"],
    files: Sequence[tuple[str, int]],
    order: Order | None = None,
    with_lists: bool = False,
) -> Conversion:
    """Write the rows of a data folder, in the given order, into new files of given names and sizes."""
    plan = replace(_plan(open_data(folder), to, shards=len(files)), with_lists=with_lists)
    return _write_folder(plan, order or _unchanged, sum(size for _, size in files), Path(out), files)


def bin_by_length(
    folder: str | Path,
    out: str | Path,
    *,
    to: Target = "hdf5-fixed",
    shards: int = 0,
    seed: int = 12345,
    max_predictions: int = 0,
    vocab: str | Path | None = None,
) -> dict[int, Conversion]:
    """Sort the rows of a data folder into sub-folders 128, 256, 384 and 512, each for lengths up to its name.

    Returns the conversion of each sub-folder; empty ones are not made. Rows keep their order.
    """
    source = open_data(folder, vocab=vocab)
    longest, limit = int(source.lengths.max()), LENGTH_BINS[-1]
    if longest > limit:
        raise UserError(
            "example-too-long", f"{folder} has an example of {longest} tokens; `data bin` takes at most {limit}"
        )
    plan = _plan(source, to, shards, seed, limit, max_predictions)
    refuse_occupied(Path(out))
    bin_of_row = np.searchsorted(LENGTH_BINS, source.lengths)
    counts = {number: int(count) for number, count in enumerate(np.bincount(bin_of_row)) if count}
    for number, count in counts.items():
        if shards > count:
            few = f"the folder {LENGTH_BINS[number]} would have {counted(count, 'example')}"
            raise UserError("option-out-of-range", f"--shards is {shards}, but {few}; lower it")
    written = {}
    with new_folder(Path(out)) as partial:
        source.vocabulary.save(partial / VOCABULARY)
        for number, count in counts.items():
            chosen, name = np.flatnonzero(bin_of_row == number), str(LENGTH_BINS[number])
            one = _write_folder(plan, chosen.__getitem__, count, partial / name)
            written[LENGTH_BINS[number]] = replace(one, folder=str(Path(out) / name))
    return written


def eval_set(
    folder: str | Path,
    out: str | Path,
    *,
    count: int = 10000,
    to: Target | None = None,
    seed: int = 12345,
    vocab: str | Path | None = None,
) -> Conversion:
    """Pick `count` rows, evenly strided as MLPerf's reference does it, into one file.

    Without `to`, the layout is that of the folder if it can be written, else Arrow.
    """
    source = open_data(folder, vocab=vocab)
    if not 1 <= count <= len(source):
        raise UserError("option-out-of-range", f"--count is {count}, but {folder} has {len(source)} examples; lower it")
    name = {"tfrecord-packed": "tfrecord"}.get(source.layout, source.layout)
    same = [target for target in get_args(Target) if target == name]
    plan = _plan(source, to or (same[0] if same else "arrow"), shards=1, seed=seed)
    return _write_folder(plan, strided(len(source), count), count, Path(out))


def strided(total: int, count: int) -> Order:
    """`count` evenly strided rows of `total`, exactly those that MLPerf's reference picks."""
    stride = total / count  # a float; positions are truncated after multiplying
    return lambda positions: (positions * stride).astype(np.int64)


def _unchanged(positions: Ints) -> Ints:
    return positions


def _plan(
    source: DataSource, to: Target, shards: int, seed: int = 0, max_seq_length: int = 0, max_predictions: int = 0
) -> ConversionPlan:
    width, words = max_seq_length or source.max_seq_length, source.vocabulary
    longest = int(source.lengths.max())
    if width < longest:
        raise UserError(
            "example-too-long", f"--max-seq-length is {width}, but an example has {longest} tokens; raise it"
        )
    rules = None
    if source.predictions is not None:
        most = int(source.predictions.max())
        predictions = max_predictions or source.max_predictions
        if predictions < most:
            wrong = f"--max-predictions is {predictions}, but an example has {most} masked words"
            raise UserError("too-many-predictions", f"{wrong}; raise it")
    elif to == "arrow":
        predictions = 0
        if max_predictions:
            why = "--max-predictions has no effect on unmasked rows, which --to arrow keeps"
            raise UserError("option-without-effect", f"{why}; leave it out")
    else:
        noted = source.manifest["preparation"] if isinstance(source, Shards) else {}
        probability = noted.get("masked_lm_prob", MASK_PROBABILITY)
        # Rounded down, to the 76 of 512 tokens in MLPerf's files. `DataSettings.usual_predictions` rounds up, so that
        # training predicts in the longest rows too; here the width of the arrays in existing files depends on it.
        predictions = max_predictions or noted.get("max_predictions") or max(1, int(probability * width))
        rules = MaskingRules.of(words, max_predictions=predictions, probability=probability)
    is_small = max(len(words.words), width) <= 1 << 15
    shape = Shape(width, predictions, np.int16 if is_small else np.int32)
    return ConversionPlan(source, to, shape, rules, seed, shards)


def shard_sizes(count: int, shards: int) -> list[int]:
    """Sizes of `shards` files of `count` records, which differ by at most one, larger ones first."""
    shards = shards or -(-count // ROWS_PER_SHARD)
    if not 1 <= shards <= count:
        raise UserError("option-out-of-range", f"--shards is {shards}; it must be 1 to {count} (all records)")
    return [count // shards + (number < count % shards) for number in range(shards)]


def _refuse_too_large(plan: ConversionPlan, records: int) -> None:
    """Refuse a file with too many records to build in memory."""
    shape, free = plan.shape, free_memory()
    is_compact = plan.to in ("arrow", "hdf5-varlength")
    width = float(plan.source.lengths.mean()) if is_compact else shape.max_seq_length
    token_bytes = np.dtype(shape.token_type).itemsize
    masks = 2 * token_bytes * shape.max_predictions if plan.has_masks else 0
    size = int(records * (width * (token_bytes + 2) + masks + 64))  # 2: masks and segments; 64: references to lists
    if plan.to != "tfrecord" and free is not None and size > free:
        what = f"a file of {records:,} rows as {plan.to} takes about {size / GIB:.1f} GiB of memory"
        cure = "write --to hdf5-varlength" if plan.to == "hdf5-per-length" else "use more --shards"
        raise UserError("out-of-memory", f"{what}, and {free / GIB:.1f} GiB are free; {cure}")


def _write_folder(
    plan: ConversionPlan, order: Order, count: int, out: Path, files: Sequence[tuple[str, int]] | None = None
) -> Conversion:
    """Write the rows order(0), ... order(count - 1) to a new folder, into `files` of given names and sizes."""
    refuse_occupied(out)
    records = count
    if plan.to == "arrow":
        num_files = _write_arrow(plan, order, shard_sizes(count, plan.shards), out)
    else:
        with new_folder(out) as partial:
            plan.source.vocabulary.save(partial / VOCABULARY)
            if plan.to == "hdf5-packed":
                records, num_files = _write_packed(plan, order, count, partial)
            elif plan.to == "hdf5-per-length":
                num_files = _write_per_length(plan, order, count, partial)
            else:
                num_files = _write_rows(plan, order, partial, files or _name_files(plan, count))
    return Conversion(
        folder=str(out),
        layout=plan.to,
        rows=count,
        records=records,
        files=num_files,
        max_seq_length=plan.shape.max_seq_length,
        max_predictions=plan.shape.max_predictions,
        masks="drawn" if plan.masking else "kept" if plan.has_masks else "none",
    )


def _name_files(plan: ConversionPlan, count: int) -> list[tuple[str, int]]:
    sizes = shard_sizes(count, plan.shards)
    name = "part-{:05d}-of-{:05d}.tfrecord" if plan.to == "tfrecord" else "part_{:05d}_of_{:05d}.hdf5"
    return [(name.format(number, len(sizes)), size) for number, size in enumerate(sizes)]


def _write_rows(plan: ConversionPlan, order: Order, folder: Path, files: Sequence[tuple[str, int]]) -> int:
    """Write files of one example per record; returns their number."""
    layout, encode = ("varlength", to_varlength) if plan.to == "hdf5-varlength" else ("fixed", to_fixed)
    _refuse_too_large(plan, max(size for _, size in files))
    first = 0
    for name, size in files:
        (folder / name).parent.mkdir(exist_ok=True)
        blocks = _blocks(plan, order, first, first + size)
        if plan.with_lists:
            rows = order(np.arange(first, first + size)).tolist()
            (folder / name).with_suffix(".lst").write_text(json.dumps(rows) + "\n")
        if plan.to == "tfrecord":
            tfrecord.write(folder / name, blocks, plan.shape)
        else:
            hdf5.write(folder / name, layout, (encode(block, plan.shape) for block in blocks), size, plan.shape)
        first += size
    return len(files)


def _write_per_length(plan: ConversionPlan, order: Order, count: int, folder: Path) -> int:
    """Write a file for every length, also for those that no example has; returns their number."""
    if plan.shards:
        raise UserError("option-without-effect", "hdf5-per-length has one file for each length; leave --shards out")
    lengths = _lengths(plan, order, count)
    positions = np.argsort(lengths, kind="stable")
    counts = np.bincount(lengths, minlength=plan.shape.max_seq_length + 1).tolist()
    files = [(f"train_sentences_{length:03d}.hdf5", number) for length, number in enumerate(counts) if length]
    return _write_rows(plan, lambda chunk: order(positions[chunk]), folder, files)


def _write_packed(plan: ConversionPlan, order: Order, count: int, folder: Path) -> tuple[int, int]:
    """Write files of packs; returns the number of packs and of files."""
    packing = plan_packing(
        _lengths(plan, order, count),
        row_length=plan.shape.max_seq_length,
        algorithm=plan.packing,
        max_per_row=plan.max_per_row,
        seed=plan.seed,
    )
    sizes = shard_sizes(len(packing), plan.shards)
    _refuse_too_large(plan, sizes[0])
    first = 0
    for number, size in enumerate(sizes):
        packs = _packs(plan, order, packing, first, first + size)
        hdf5.write(folder / f"part_{number:05d}", "packed", packs, size, plan.shape)
        if plan.with_lists:
            members, offsets = packing.rows(first, first + size)
            rows = [part.tolist() for part in np.split(order(members), offsets[1:-1])]
            (folder / f"shard_list_{number:05d}.lst").write_text(json.dumps(rows) + "\n")
        first += size
    return len(packing), len(sizes)


def _packs(plan: ConversionPlan, order: Order, packing: Packing, first: int, last: int) -> Iterator[Fields]:
    for begin in range(first, last, ROWS_AT_ONCE):
        members, offsets = packing.rows(begin, min(begin + ROWS_AT_ONCE, last))
        yield to_packed(_read(plan, order(members)), np.diff(offsets), plan.shape)


def _lengths(plan: ConversionPlan, order: Order, count: int) -> npt.NDArray[np.int32]:
    lengths = np.empty(count, dtype=np.int32)
    for first in range(0, count, ROWS_PER_SHARD):
        chunk = np.arange(first, min(first + ROWS_PER_SHARD, count))
        lengths[chunk] = plan.source.lengths[order(chunk)]
    return lengths


def _write_arrow(plan: ConversionPlan, order: Order, sizes: list[int], out: Path) -> int:
    _refuse_too_large(plan, sizes[0])
    source = plan.source
    made: dict[str, Any] = dict(source.manifest["preparation"]) if isinstance(source, Shards) else {}
    made |= {"converted_from": source.layout, "max_seq_length": plan.shape.max_seq_length}
    if plan.has_masks:
        made["max_predictions"] = plan.shape.max_predictions
    ends = np.cumsum(sizes).tolist()
    shards = (
        # Narrow before they are joined: as they are read they take up to four times the memory.
        concatenate([narrow(block, source.vocabulary) for block in _blocks(plan, order, end - size, end)])
        for size, end in zip(sizes, ends, strict=True)
    )
    write_blocks(out, shards, source.vocabulary, preparation=made)
    return len(sizes)


def _blocks(plan: ConversionPlan, order: Order, first: int, last: int) -> Iterator[Block]:
    for begin in range(first, last, ROWS_AT_ONCE):
        yield _read(plan, order(np.arange(begin, min(begin + ROWS_AT_ONCE, last))))


def _read(plan: ConversionPlan, rows: Ints) -> Block:
    block = plan.source.read(rows)
    if plan.masking is None:
        return block
    keys = np.full(len(rows), derive(plan.seed, "mask", "convert"), dtype=np.uint64)
    return draw_masks(block, rows, keys, plan.masking)
