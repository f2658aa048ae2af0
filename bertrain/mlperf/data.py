"""`bertrain data mlperf`: MLPerf's data from its text, in the folders and under the names of NVIDIA's prepare_data.

Every stage makes one folder, which is renamed when it is complete: a stage is finished if its folder exists, and an
interrupted preparation resumes with the first that is missing. A record beside each folder lists its inputs; a folder
with other inputs is refused. All layouts are written from one set of memory-mapped Arrow shards, so a stage needs
memory only for an order of rows.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import tarfile
import tempfile
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bertrain.base.errors import UserError
from bertrain.base.files import file_digest, new_folder, write_atomically
from bertrain.base.schema import JsonError, load_json
from bertrain.data.formats.convert import convert, convert_into, shard_sizes, strided
from bertrain.data.formats.hdf5 import row_checksum
from bertrain.data.formats.shards import Shards
from bertrain.data.prepare.prepare import prepare
from bertrain.data.text.download import MLPERF_FILES, download, parse_checksums
from bertrain.data.text.streams import DAMAGE
from bertrain.weights.export import export

PREDICTIONS, DUPE_FACTOR, SEED = {512: 76, 128: 20}, 10, 12345  # predictions by the length of sequences
SHUFFLE_SEED = 24  # of NVIDIA's shuffle, since v3.0
PICKED = "part_eval_10k.hdf5"
TEXT_CHECKSUMS, CHECKPOINT = "bert_reference_results_text_md5.txt", "model.ckpt-28252"

# Row checksums that NVIDIA publishes (the first of its lists), by folder and file.
ROW_CHECKSUMS = {
    "hdf5_4320_shards_varlength": {
        "part_00000_of_04320": "e25b1a34b8d14179b2774d1dbf3b7561",
        "part_00001_of_04320": "f9455f720575b25ec923a71caa657f84",
    },
    "hdf5_4320_shards_varlength_shuffled": {"part_00000_of_04320": "a0592b1f501328540c6fe8404a1c7f81"},
    "hdf5_2048_shards_varlength": {"part_00000_of_02048": "ac517231f748d9ae0dad04cce21ab01d"},
    "eval_varlength": {"part_eval_10k": "611d8bae26646145e1c33338a27ba124"},
}


@dataclass(frozen=True)
class Stage:
    """One folder, the function that makes it, and its inputs: text files and options.

    `needed`: training or a later stage reads it.
    """

    place: str
    make: Callable[[Path], object]
    text: list[Path]
    options: dict[str, int] = field(default_factory=dict)
    needed: bool = True


def mlperf_data(
    out: str | Path,
    *,
    packed: bool = False,
    skip_download: bool = False,
    mirror: str | None = None,
    shards: int = 4320,
    eval_count: int = 10_000,
    max_seq_length: int = 512,
    needed_only: bool = False,
    intermediate: bool = False,
    convert_checkpoint: bool = False,
    workers: int = 1,
    say: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Make MLPerf's training and evaluation data below `out`, from its text to shuffled and, if asked, packed shards.

    With `skip_download`, the text must be in out/download/results4 and the vocabulary in out/phase1; it may be other
    text of the same format. If MLPerf's list of checksums lies beside it, every file is compared. Data of
    `max_seq_length` 128, as Intel trains phase 1 on, goes below out/length-128. `convert_checkpoint` also writes
    out/phase1/model.ckpt-28252.pt, which NVIDIA's own trainer reads. For MLPerf's own text, known checksums of the rows
    are compared, and a difference raises UserError. Existing folders are kept if they were made from this text with
    these options, else refused.
    `needed_only` leaves out the folders that no training reads; `intermediate` also writes those that only NVIDIA's
    own preparation reads. Returns the outcome of each stage.
    """
    out = Path(out)
    if needed_only and intermediate:
        raise UserError("conflicting-options", "--needed-only leaves out what --intermediate asks for; give one")
    say = say or (lambda line: None)
    if max_seq_length not in PREDICTIONS:
        raise UserError("option-out-of-range", f"--max-seq-length is {max_seq_length}; it must be 128 or 512")
    if not skip_download:
        download("mlperf", out, mirror=mirror)
    text = _find_text(out)
    if skip_download and (compared := _check_text(out)):
        say(f"{compared} text files have the checksums that {TEXT_CHECKSUMS} lists")
    vocab = out / "phase1" / "vocab.txt"
    if not vocab.is_file():
        raise UserError("missing-vocabulary", f"no vocabulary at {vocab}; put it there, or leave --skip-download out")
    is_mlperfs = _is_mlperf_text(text)
    say(f"{len(text) - 1} text files; {'' if is_mlperfs else 'not '}MLPerf's own, by the known checksums")
    digests = {path: file_digest(path)[1] for path in (*text, vocab)}
    planned = stages(
        out, text, vocab, packed=packed, shards=shards, eval_count=eval_count, max_seq_length=max_seq_length,
        intermediate=intermediate, workers=workers,
    )  # fmt: skip
    asked = [stage for stage in planned if stage.needed or not needed_only]
    inputs = {stage.place: {path.name: digests[path] for path in (*stage.text, vocab)} for stage in asked}
    records = {stage.place: {"options": stage.options, "inputs": inputs[stage.place]} for stage in asked}
    for stage in asked:
        if (out / stage.place).exists():
            _check_record(out / stage.place, records[stage.place])
    done = dict.fromkeys((stage.place for stage in planned), "left out")
    for stage in asked:
        place = out / stage.place
        if place.exists():
            done[stage.place] = "was there"
            continue
        say(f"making {stage.place}")
        place.parent.mkdir(parents=True, exist_ok=True)
        for left_over in place.parent.glob(f".{place.name}.partial-*"):  # of a killed process
            shutil.rmtree(left_over)
        # The record first: the folder appears by a rename, so an existing folder always has its record.
        write_atomically(_record_path(place), json.dumps(records[stage.place], indent=1) + "\n")
        stage.make(place)
        done[stage.place] = "made"
    if convert_checkpoint:
        done[f"phase1/{CHECKPOINT}.pt"] = _convert_checkpoint(out / "phase1")
    compared = compare_checksums(out, shards) if is_mlperfs and max_seq_length == 512 else 0
    return {"out": str(out), "stages": done, "is_mlperfs_text": is_mlperfs, "checksums_compared": compared}


def stages(
    out: Path, text: list[Path], vocab: Path, *, packed: bool, shards: int, eval_count: int, max_seq_length: int,
    intermediate: bool, workers: int,
) -> list[Stage]:  # fmt: skip
    """All stages in order. `text` is the parts, then eval.txt."""
    below = "" if max_seq_length == 512 else f"length-{max_seq_length}/"
    lengths: dict[str, Any] = {"max_seq_length": max_seq_length, "max_predictions": PREDICTIONS[max_seq_length]}
    settings = lengths | {"reference": True, "vocab": vocab, "dupe_factor": DUPE_FACTOR, "seed": SEED}
    *parts, held_out = text
    training, evaluation = out / below / "arrow" / "training", out / below / "arrow" / "eval"
    sharded = f"hdf5/training-{shards}/hdf5_{shards}_shards"
    sharding, picking = {"--shards": shards}, {"--eval-count": eval_count}
    listing = sharding | ({"--intermediate": 1} if intermediate else {})
    fixed = partial(convert, training, to="hdf5-fixed", shards=shards)
    varlength = partial(convert, training, to="hdf5-varlength", shards=shards)
    made = [
        Stage("arrow/training", lambda place: prepare(parts, place, per_file=True, workers=workers, **settings), parts),
        Stage("hdf5/training", lambda place: _write_as_parts(training, place, parts), parts, needed=False),
        Stage(f"{sharded}_uncompressed", fixed, parts, sharding, needed=False),
        Stage(f"{sharded}_varlength", varlength, parts, sharding),
        Stage(
            f"{sharded}_varlength_shuffled", partial(_write_shuffled, training, shards, intermediate), parts, listing
        ),
        Stage("arrow/eval", lambda place: prepare([held_out], place, **settings), [held_out]),
        Stage("hdf5/eval", partial(_write_evaluation, evaluation, eval_count), [held_out], picking, needed=False),
        Stage("hdf5/eval_varlength", partial(_pick_evaluation, evaluation, eval_count), [held_out], picking),
    ]
    if packed:
        packing: dict[str, Any] = {"to": "hdf5-packed", "packing": "nnlshp", "max_per_row": 3, "shards": shards}
        packing["with_lists"] = intermediate
        by_part = Stage("per_seqlen_parts", partial(_write_per_length_and_part, training, len(parts)), parts)
        made += [by_part] if intermediate else []
        made += [
            Stage("per_seqlen", lambda place: convert(training, place, to="hdf5-per-length"), parts, needed=False),
            Stage("packed_data", lambda place: convert(training, place, **packing), parts, listing),
        ]
    return [replace(stage, place=f"{below}{stage.place}") for stage in made]


# --- the inputs of a stage -------------------------------------------------------------------------------


def _record_path(place: Path) -> Path:
    return place.with_name(f".{place.name}.made-of.json")


def _check_record(place: Path, wanted: dict[str, Any]) -> None:
    """Refuse an existing folder of a stage that was made from other inputs."""
    remedy = f"remove {place} or choose another --out"
    try:
        record = load_json(_record_path(place), {"options": dict[str, Any], "inputs": dict[str, Any]})
    except (OSError, JsonError):
        raise UserError("unknown-stage", f"{place} exists, but has no record of its inputs; {remedy}") from None
    options, inputs = record["options"], record["inputs"]
    for option, value in wanted["options"].items():
        if options.get(option) != value:
            was = options.get(option)
            raise UserError("other-stage", f"{place} was made with {option} {was}, not {value}; {remedy}")
    for name in sorted(inputs.keys() | wanted["inputs"].keys()):
        if inputs.get(name) != wanted["inputs"].get(name):
            raise UserError("other-stage", f"{place} was made from another {name}; {remedy}")


def _find_text(out: Path) -> list[Path]:
    """The parts of the text in order, and eval.txt; unpacks their archive if necessary."""
    folder, packed = out / "download" / "results4", out / "download" / "results_text.tar.gz"
    if not folder.exists() and packed.is_file():
        _unpack(packed, folder)
    parts = sorted(path for path in folder.glob("part-*-of-*") if re.fullmatch(r"part-\d{5}-of-\d{5}", path.name))
    if not parts:
        raise UserError(
            "missing-input", f"{folder} has no files such as part-00000-of-00500; leave --skip-download out"
        )
    expected = int(parts[0].name[-5:])
    if [path.name for path in parts] != [f"part-{number:05d}-of-{expected:05d}" for number in range(expected)]:
        raise UserError("missing-input", f"{folder} contains {len(parts)} of {expected} parts; download the rest")
    if not (folder / "eval.txt").is_file():
        raise UserError("missing-input", f"{folder} has no eval.txt, the text for evaluation; put it there")
    return [*parts, folder / "eval.txt"]


def _unpack(archive: Path, folder: Path) -> None:
    """Unpack the files of results_text.tar.gz, from whatever folder in it."""
    try:
        with tarfile.open(archive) as tar, new_folder(folder) as partial:
            for member in tar:
                content = tar.extractfile(member) if member.isreg() else None
                if content is not None:
                    with content, open(partial / Path(member.name).name, "wb") as file:
                        shutil.copyfileobj(content, file)
    except DAMAGE as error:
        raise UserError("damaged-input", f"{archive} is damaged ({error}); remove it and download it again") from None


def _check_text(out: Path) -> int:
    """Compare the text with the list of MD5 sums beside it; returns the number of files, 0 without a list."""
    path = out / "download" / TEXT_CHECKSUMS
    if not path.is_file():
        return 0
    listed = parse_checksums(path.read_text(errors="replace"), str(path))
    for md5, name in listed:
        file = out / "download" / "results4" / name
        if not file.is_file():
            raise UserError("missing-input", f"no {file}, which {path.name} lists; download it, or remove the list")
        if file_digest(file, "md5")[1] != md5:
            raise UserError("wrong-checksum", f"{file} is not the file that {path.name} lists; download it again")
    return len(listed)


def _convert_checkpoint(folder: Path) -> str:
    """Write model.ckpt-28252.pt beside the TensorFlow checkpoint of the same name."""
    made = folder / f"{CHECKPOINT}.pt"
    if made.is_file():
        return "was there"
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        written = export(folder / CHECKPOINT, Path(temporary) / "pt", to="nvidia")
        next(written.glob("*.pt")).rename(made)
    return "made"


def _is_mlperf_text(text: list[Path]) -> bool:
    """Whether the text has the published checksums; refuses text of which only some files have."""
    known = {path: MLPERF_FILES[path.name] for path in text if path.name in MLPERF_FILES}
    differing = [path for path, published in known.items() if file_digest(path, "md5") != published]
    if differing and len(differing) < len(known):
        raise UserError("wrong-checksum", f"{differing[0]} is not the file that MLPerf published; download it again")
    return bool(known) and not differing


def _write_as_parts(training: Path, place: Path, parts: list[Path]) -> None:
    """Fixed-width files named after the text files."""
    sizes = Shards.open(training, verify="size").manifest["preparation"]["rows_per_input"]
    names = [f"{part.name}.hdf5" for part in parts]
    convert_into(training, place, to="hdf5-fixed", files=list(zip(names, sizes, strict=True)))


def _write_per_length_and_part(training: Path, num_parts: int, place: Path) -> None:
    """Fixed-width files of the rows of each length, a folder of them for each text file."""
    source = Shards.open(training, verify="size")
    part = np.repeat(np.arange(num_parts), source.manifest["preparation"]["rows_per_input"])
    lengths = source.lengths
    order = np.lexsort((lengths, part))  # stable: rows of one length keep their order
    counts = np.zeros((num_parts, source.max_seq_length + 1), dtype=np.int64)
    np.add.at(counts, (part, lengths), 1)
    files = [
        (f"part-{number:05d}/seqlength_{length:03d}.hdf5", int(row[length]))
        for number, row in enumerate(counts)
        for length in range(1, len(row))
    ]
    convert_into(training, place, to="hdf5-fixed", files=files, order=lambda positions: order[positions])


def _write_shuffled(training: Path, shards: int, with_lists: bool, place: Path) -> None:
    """Variable-length shards shuffled by Python's random.shuffle, as NVIDIA does."""
    count = len(Shards.open(training, verify="size"))
    order = np.frombuffer(shuffled(count, SHUFFLE_SEED), dtype=np.uint32)
    names = [f"part_{number:05d}_of_{shards:05d}.hdf" for number in range(shards)]
    files = list(zip(names, shard_sizes(count, shards), strict=True))
    into_order = lambda positions: order[positions].astype(np.int64)  # noqa: E731
    convert_into(training, place, to="hdf5-varlength", files=files, order=into_order, with_lists=with_lists)


def shuffled(count: int, seed: int) -> array[int]:
    """The result of random.shuffle on range(count), in four bytes each."""
    numbers = array("I", range(count))
    random.Random(seed).shuffle(numbers)
    return numbers


def _write_evaluation(evaluation: Path, count: int, place: Path) -> None:
    """All examples of the held-out text in one file, and `count` evenly strided ones in another."""
    total = _count_rows(evaluation, count)
    picked = strided(total, count)
    order = lambda positions: np.where(positions < total, positions, picked(positions - total))  # noqa: E731
    convert_into(evaluation, place, to="hdf5-fixed", files=[("eval_all.hdf5", total), (PICKED, count)], order=order)


def _pick_evaluation(evaluation: Path, count: int, place: Path) -> None:
    order = strided(_count_rows(evaluation, count), count)
    convert_into(evaluation, place, to="hdf5-varlength", files=[(PICKED, count)], order=order)


def _count_rows(evaluation: Path, count: int) -> int:
    """The number of rows to pick `count` from."""
    total = len(Shards.open(evaluation, verify="size"))
    if count > total:
        raise UserError(
            "option-out-of-range", f"--eval-count is {count}, but {evaluation} has {total} examples; lower it"
        )
    return total


def compare_checksums(out: Path, shards: int) -> int:
    """Compare the rows of every file whose checksum NVIDIA publishes; returns the number of files."""
    compared = 0
    for folder in (out / "hdf5" / f"training-{shards}", out / "hdf5"):
        for name, known in ROW_CHECKSUMS.items():
            for path in sorted((folder / name).glob("part_*.hdf*")):
                expected = known.get(path.stem)
                if expected is not None and (actual := row_checksum(path)) != expected:
                    raise UserError("wrong-checksum", f"the rows of {path} have the checksum {actual}, not {expected}")
                compared += expected is not None
    return compared
