"""`bertrain data extract`: dumps, archives and tables to text, a sentence per line and a blank line between documents.

One process cuts the inputs into records and writes the results in input order; workers parse in between. So the output
does not depend on the number of workers, and memory holds only a few batches.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import asdict, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from bertrain.base.console import remark, warn
from bertrain.base.errors import UserError
from bertrain.base.files import file_digest, new_folder, refuse_occupied
from bertrain.base.formatting import counted, few
from bertrain.base.seeds import derive
from bertrain.base.units import check_ranges
from bertrain.config.choices import DocumentEnd, Form, OnError, Splitter
from bertrain.data.text.documents import EXTRACT_DESCRIPTION, EXTRACT_TRAINING, Document, find_inputs
from bertrain.data.text.languages import LANGUAGES, check_language
from bertrain.data.text.parsing import Result, parse_records
from bertrain.data.text.processes import process_pool
from bertrain.data.text.progress import progress
from bertrain.data.text.records import Problem, Reading, Record, read_records
from bertrain.data.text.survey import Survey, survey

EVALUATION = "eval.txt"
HOLD_OUT_SEED = 12345
SAMPLED_BYTES = 4 << 20
PROBLEMS_LISTED = 100

_BATCH_BYTES = 1 << 18  # large enough to outweigh the transfer to a worker and back
_Item = TypeVar("_Item")
_Made = TypeVar("_Made")


def extract(
    inputs: str | Path | Iterable[str | Path],
    out: str | Path,
    *,
    form: Form = "auto",
    text_column: str = "auto",
    encoding: str = "auto",
    document_end: DocumentEnd = "auto",
    wrapped: bool | None = None,
    sentences: Splitter = "sentencex",
    language: str = "auto",
    min_characters: int = 0,
    deduplicate: bool = False,
    hold_out: float = 0,
    hold_out_seed: int = HOLD_OUT_SEED,
    on_error: OnError = "stop",
    part_bytes: int = 27_000_000,
    workers: int = 1,
) -> dict[str, Any]:
    """Turn documents of any source into text files, one sentence per line and a blank line between documents.

    Writes `train/part-00000-of-00003.txt` and so on into the folder `out`, `eval.txt` with `hold_out` whole documents
    drawn by `hold_out_seed`, and `extract.json`, which describes them and is returned. What is "auto" follows from a
    `survey` of the inputs. `hold_out` below 1 is a share of the documents.

    `on_error` "skip" drops and counts damaged records and bytes that are not in the `encoding`;
    otherwise the first one raises UserError. In a folder, `document_end` "auto" leaves out files that are not text.
    With several workers, a script must call this under `if __name__ == "__main__":`.

    Example: bertrain.extract("articles.txt", "text")
    """
    settings = {name: value for name, value in locals().items() if name not in ("inputs", "out", "workers")}
    check_ranges(
        ("--part-bytes", part_bytes, 1, math.inf),
        ("--workers", workers, 1, math.inf),
        ("--min-characters", min_characters, 0, math.inf),
        ("--hold-out", hold_out, 0, math.inf),
    )
    if hold_out_seed != HOLD_OUT_SEED and not hold_out:
        raise UserError("option-without-effect", "--hold-out-seed needs --hold-out; give both, or leave it out")
    out = Path(out)
    refuse_occupied(out)
    source = _look_at(inputs, form, text_column, encoding, document_end, wrapped, sentences, language)
    found, said = source.survey, source.sentences
    remark("\n".join(said))
    with new_folder(out) as folder, progress("extract", found.bytes) as report:
        tally = _Tally(min_characters, deduplicate, on_error)
        guessed: list[str] = []
        records = _all_records(source.files, source, report, guessed)
        batches = in_order(source.parse, _batches(records), min(workers, 1 + (found.bytes >> 20)))
        kept = (result.document for results in batches for result in results if tally.keeps(result))
        parts = _write_parts(kept, folder / EXTRACT_TRAINING, part_bytes)
        tally.refuse_no_document()
        held_out = int(hold_out) if hold_out >= 1 else round(hold_out * tally.counts["documents"])
        if hold_out:
            held_out = max(1, held_out)
            _hold_out(held_out, hold_out_seed, tally.counts["documents"], parts, folder / EVALUATION)
        description = {
            "inputs": [file.name for file in source.files],
            "settings": settings,
            "survey": asdict(found) | {"said": said},
            "counts": tally.counts | {"held_out": held_out},
            "skipped": dict(sorted(tally.skipped.items())),
            "guessed_encoding": guessed,
            "lost_bytes": dict(tally.lost_bytes),
            "problems": tally.problems,
            "files": _name_parts(folder),
        }
        (folder / EXTRACT_DESCRIPTION).write_text(json.dumps(description, indent=1) + "\n")
    if sentence := _describe_guessed(guessed, encoding):
        remark(sentence)
    if tally.skipped_files:
        remark(f"{counted(len(tally.skipped_files), 'file')} left out, not text: {few(tally.skipped_files)}")
    if tally.lost_bytes:
        lines = counted(tally.counts["lines_not_utf8"], "line")
        files = counted(len(tally.lost_bytes), "file")
        warn(f"{lines} in {files} had bytes that cannot be decoded, which were left out: {few(tally.lost_bytes)}")
    mean = tally.counts["sentences"] / tally.counts["documents"]
    if mean < 2 and tally.counts["documents"] >= 20 and "text" in found.forms:
        cure = "if these are parts of longer ones, give another --document-end, such as file or size"
        warn(f"a document has only {mean:.1f} sentences on average; {cure}")
    return description


def estimate(
    inputs: str | Path | Iterable[str | Path],
    *,
    text_column: str = "auto",
    encoding: str = "auto",
    document_end: DocumentEnd = "auto",
    language: str = "auto",
    on_error: OnError = "stop",
) -> tuple[list[str], dict[str, int]]:
    """What `extract` would say of the inputs and count in them, from a sample of some megabytes. Writes nothing.

    Raises UserError for what `extract` would refuse, as far as the sample shows it.
    """
    source = _look_at(inputs, "auto", text_column, encoding, document_end, None, "sentencex", language)
    tally, num_bytes = _Tally(0, False, on_error), 0
    guessed: list[str] = []
    files = list(source.files)
    random.Random(0).shuffle(files)
    for file in files:
        num_read = [0]
        records = _all_records([file], source, partial(num_read.__setitem__, 0), guessed)
        for result in chain.from_iterable(map(source.parse, _batches(records))):
            tally.keeps(result)
            if num_read[0] > SAMPLED_BYTES:
                break
        num_bytes += num_read[0]
        if num_bytes > SAMPLED_BYTES:
            break
    tally.refuse_no_document()
    times = max(1.0, source.survey.bytes / max(1, num_bytes))
    said = [*source.sentences, *([_describe_guessed(guessed, encoding)] if guessed else [])]
    return said, {name: round(times * count) for name, count in tally.counts.items()}


def _describe_guessed(names: list[str], encoding: str) -> str:
    """Says which files were in another encoding than expected, and how they were read; empty if there are none."""
    if not names:
        return ""
    if encoding != "auto":
        return f"{counted(len(names), 'file')} in UTF-8 or UTF-16, not read as --encoding {encoding}: {few(names)}"
    return f"{counted(len(names), 'file')} not in UTF-8, read as Windows-1252 (--encoding auto): {few(names)}"


class _Source(NamedTuple):
    """Inputs, what they look like, and how their records are read and parsed."""

    files: list[Path]
    survey: Survey
    sentences: list[str]
    reading: Reading
    named: set[Path]  # files that may not be binary
    parse: Callable[[list[Record | Problem]], list[Result]]


def _look_at(
    inputs: str | Path | Iterable[str | Path],
    form: Form,
    text_column: str,
    encoding: str,
    document_end: DocumentEnd,
    wrapped: bool | None,
    sentences: Splitter,
    language: str,
) -> _Source:
    check_language(language)
    inputs = [inputs] if isinstance(inputs, str | Path) else list(inputs)
    files = find_inputs(inputs)
    found = survey(files, form=form, encoding=encoding, text_column=text_column)
    is_auto = document_end == "auto"
    joins = found.wrapped and sentences != "lines" if is_auto else document_end == "file"
    document_end = found.document_end if is_auto else document_end
    why = found.why if is_auto else "--document-end"
    found = replace(found, document_end=document_end, why=why, wrapped=joins if wrapped is None else wrapped)
    language = (found.language or "en") if language == "auto" else language
    rules = f"sentences are split by the rules of {LANGUAGES.get(language, language)}"
    return _Source(
        files=files,
        survey=found,
        sentences=found.sentences + [rules] * (sentences == "sentencex"),
        reading=Reading(form, encoding, text_column, document_end, found.wrapped),
        named=set(map(Path, inputs)) if is_auto else set(files),
        parse=partial(parse_records, splitter=sentences, language=language),
    )


def _all_records(
    files: list[Path], source: _Source, report: Callable[[int], None], guessed: list[str]
) -> Iterator[Record | Problem]:
    """The records of all files; those that are not `named` may be binary."""
    before = 0
    for file in files:
        done = partial(lambda before, done: report(before + done), before)
        yield from read_records(file, source.reading, done, guessed, skip_binary=file not in source.named)
        before += file.stat().st_size


def _batches(records: Iterable[Record | Problem]) -> Iterator[list[Record | Problem]]:
    batch: list[Record | Problem] = []
    size = 0
    for record in records:
        batch.append(record)
        size += len(record.content) if isinstance(record, Record) else 0
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    yield batch


def in_order(function: Callable[[_Item], _Made], items: Iterable[_Item], workers: int) -> Iterator[_Made]:
    """`function` of each item, in order, computed by `workers` processes; reads only a few items ahead."""
    if workers == 1:
        yield from map(function, items)
        return
    with process_pool(workers) as pool:
        waiting: deque[Future[_Made]] = deque()
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) > 3 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


class _Tally:
    """Decides which documents are kept, and counts kept and skipped ones."""

    def __init__(self, min_characters: int, deduplicate: bool, on_error: OnError) -> None:
        self._min_characters = min_characters
        self._seen: set[bytes] | None = set() if deduplicate else None
        self._on_error = on_error
        self.counts = {"documents": 0, "sentences": 0, "characters": 0, "lines_not_utf8": 0}
        self.skipped: Counter[str] = Counter()
        self.lost_bytes: Counter[str] = Counter()
        """Lines that lost bytes, by file."""
        self.problems: list[str] = []
        self.skipped_files: list[str] = []

    def keeps(self, result: Result) -> bool:
        """Whether the document is kept; raises its problem, if any, unless `on_error` is skip."""
        if result.problem is not None:
            if self._on_error == "stop" and result.lines_not_utf8:
                cure = "name its encoding, such as --encoding latin-1, or drop such bytes with --on-error skip"
                raise UserError("not-utf8", f"{result.problem}; {cure}")
            if self._on_error == "stop":
                cure = "" if "--text-column" in result.problem.what else "; repair it, or skip it with --on-error skip"
                raise UserError("damaged-input", f"{result.problem}{cure}")
            if not result.lines_not_utf8 and len(self.problems) < PROBLEMS_LISTED:
                self.problems.append(str(result.problem))
        self.counts["lines_not_utf8"] += result.lines_not_utf8
        if result.lines_not_utf8:
            self.lost_bytes[result.name] += result.lines_not_utf8
        characters = sum(map(len, result.document))
        if reason := result.skipped or self._reason_to_skip(result.document, characters):
            self.skipped[reason] += 1
            if result.skipped and result.name:
                self.skipped_files.append(result.name)
            return False
        self.counts["documents"] += 1
        self.counts["sentences"] += len(result.document)
        self.counts["characters"] += characters
        return True

    def _reason_to_skip(self, document: Document, characters: int) -> str:
        if not document:
            return "empty"
        if characters < self._min_characters:
            return "short"
        if self._seen is not None:
            digest = hashlib.blake2b("\n".join(document).encode(), digest_size=16).digest()
            if digest in self._seen:
                return "duplicate"
            self._seen.add(digest)
        return ""

    def refuse_no_document(self) -> None:
        if not self.counts["documents"]:
            reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(self.skipped.items()))
            records = self.skipped.total()
            found = f"none of its {records:,} documents was kept ({reasons})" if records else "it is empty"
            cure = "name files or folders of text"
            if self.skipped["not text"] or self.lost_bytes:
                cure += ", or the encoding, such as --encoding utf-16"
            raise UserError("no-document", f"the input has no text: {found}; {cure}")


def _write_parts(documents: Iterator[Document], folder: Path, part_bytes: int) -> list[Path]:
    folder.mkdir()
    paths: list[Path] = []
    for first in documents:
        paths.append(folder / f"part-{len(paths):05d}")
        with open(paths[-1], "wb") as file:
            for document in chain([first], documents):
                file.write(("\n".join(document) + "\n\n").encode())
                if file.tell() >= part_bytes:
                    break
    return paths


def _hold_out(count: int, seed: int, documents: int, parts: list[Path], place: Path) -> None:
    """Move `count` of the documents, drawn by `seed`, from the parts to `place`, keeping the order of both."""
    if documents <= count:
        raise UserError("too-little-text", f"--hold-out is {count:,}, but there are {documents:,} documents; lower it")
    drawn = set(heapq.nsmallest(count, range(documents), key=lambda number: derive(seed, "hold-out", number)))
    number = 0
    with open(place, "wb") as held:
        for path in parts:
            kept_path = path.with_name(f"{path.name}.kept")
            with open(path, "rb") as part, open(kept_path, "wb") as kept:
                for line in part:
                    (held if number in drawn else kept).write(line)
                    number += line == b"\n"
            kept_path.replace(path)


def _name_parts(folder: Path) -> list[dict[str, Any]]:
    """Give the parts their final names, and list all files with size and hash."""
    parts = []
    for path in sorted((folder / EXTRACT_TRAINING).iterdir()):
        if path.stat().st_size:
            parts.append(path)
        else:  # all its documents were held out
            path.unlink()
    names = [f"part-{number:05d}-of-{len(parts):05d}.txt" for number in range(len(parts))]
    files = [path.rename(path.with_name(name)) for path, name in zip(parts, names, strict=True)]
    described = [(str(file.relative_to(folder)), *file_digest(file)) for file in [*files, *folder.glob(EVALUATION)]]
    return [{"name": name, "bytes": size, "sha256": digest} for name, size, digest in described]
