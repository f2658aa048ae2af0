"""`bertrain data prepare`: text to a folder of shards."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from glob import escape
from pathlib import Path
from typing import Any

from bertrain.base.console import warn
from bertrain.base.errors import UserError
from bertrain.base.files import refuse_occupied, try_lock, writing
from bertrain.base.formatting import counted
from bertrain.base.units import check_ranges
from bertrain.config.choices import MASK_PROBABILITY, Engine, OnError
from bertrain.data.formats.shards import SCHEMA_VERSION, VOCABULARY
from bertrain.data.formats.write import Histogram, finish_folder, shard_name
from bertrain.data.prepare.engines import make_units
from bertrain.data.prepare.units import Preparation, Summary, unit_folder
from bertrain.data.text.documents import Span, check_readable, find_inputs, plan_units
from bertrain.data.text.survey import survey
from bertrain.data.text.vocabulary import Vocabulary

SHORT_SEQ_PROB = 0.1
MAX_PREDICTIONS = 76
LOCK, WHOLE = "lock", "whole"
_CURE = "use `bertrain data extract INPUT --out DIR` first"
UNKNOWN_LIMIT = 0.5  # of all tokens; above it, the vocabulary is taken to be of another text

Progress = Callable[[int, int], None]  # called with the number of finished units and of all units


def prepare(
    inputs: str | Path | Iterable[str | Path],
    out: str | Path,
    *,
    vocab: str | Path | None = None,
    lower_case: bool | None = None,
    max_seq_length: int = 512,
    short_seq_prob: float | None = None,
    dupe_factor: int = 1,
    seed: int = 12345,
    full_sentences: bool = False,
    reference: bool = False,
    per_file: bool = False,
    max_predictions: int | None = None,
    masked_lm_prob: float | None = None,
    rows_per_shard: int = 65536,
    workers: int = 1,
    engine: Engine = "local",
    scheduler: str | None = None,
    on_error: OnError = "stop",
    unit_mb: float = 16,
    progress: Progress | None = None,
    dry_run: bool = False,
) -> dict[str, Any]:
    """Turn plain text (a sentence per line, a blank line between documents) into training examples.

    Returns the manifest of the folder `out`. Without `vocab`, BERT's uncased vocabulary is used. `lower_case` None
    keeps case and accents if the vocabulary has them.

    Examples are unmasked pairs, or rows of full sentences; with `reference`, exactly the masked rows of MLPerf's
    reference script, for all files together or, `per_file`, for each separately. There `max_predictions` (76) and
    `masked_lm_prob` (0.15) control masking; for other rows, which are masked later, the manifest records them for
    `convert`. `short_seq_prob` (0.1) is the share of documents cut into shorter pairs.

    The result does not depend on `workers` or `engine`, but on `unit_mb`, since a random B comes from the same unit.
    Called again after an interruption, it resumes. With several workers, a script must call this under
    `if __name__ == "__main__":`. `dry_run` checks everything and writes nothing; it returns the number of files and
    units.

    Example: bertrain.prepare("articles.txt", "data", vocab="vocab.txt", max_seq_length=128)
    """
    if full_sentences and reference:
        raise UserError("conflicting-options", "--full-sentences and --reference exclude each other; give one")
    for is_useless, option, reason in (
        (per_file and not reference, "--per-file", "without --reference"),
        (short_seq_prob is not None and full_sentences, "--short-seq-prob", "with --full-sentences"),
        (scheduler is not None and engine != "dask", "--scheduler", "without --engine dask"),
    ):
        if is_useless:
            raise UserError("option-without-effect", f"{option} has no effect {reason}; leave it out")
    recorded = {"max_predictions": max_predictions, "masked_lm_prob": masked_lm_prob}
    short_seq_prob = SHORT_SEQ_PROB if short_seq_prob is None else short_seq_prob
    max_predictions = MAX_PREDICTIONS if max_predictions is None else max_predictions
    masked_lm_prob = MASK_PROBABILITY if masked_lm_prob is None else masked_lm_prob
    check_ranges(
        ("--workers", workers, 1, math.inf),
        ("--max-seq-length", max_seq_length, 8, 1 << 16),
        ("--max-predictions", max_predictions, 1, math.inf),
        ("--dupe-factor", dupe_factor, 1, (1 << 16) - 1),
        ("--unit-mb", unit_mb, 1e-6, math.inf),
        ("--short-seq-prob", short_seq_prob, 0, 1),
        ("--masked-lm-prob", masked_lm_prob, 0, 1),
    )
    most_rows = (1 << 31) // max_seq_length - 1  # offsets of Arrow's list columns have 32 bits
    check_ranges(("--rows-per-shard", rows_per_shard, 1, most_rows))
    vocabulary = Vocabulary.load(vocab, lower_case=lower_case)
    if unreachable := vocabulary.num_unreachable:
        warn(
            f"{vocab} has {counted(unreachable, 'word')} with capitals or accents, which lower-cased text never "
            "has; if it is a cased vocabulary, use --cased"
        )
    cased = lower_case is False and not vocabulary.tokenizer
    if cased and not replace(vocabulary, lower_case=True).num_unreachable:
        named = vocab or "BERT's uncased vocabulary"
        warn(f"{named} has no word with capitals or accents: with --cased these become [UNK]; leave --cased out")
    files, unreadable = _usable(find_inputs(inputs), on_error, reference)
    if not reference and survey(files, form="text").wrapped:
        warn(f"lines look wrapped, not a sentence each; {_CURE}")
    out = Path(out)
    refuse_occupied(out)
    mode = "reference" if reference else "full-sentences" if full_sentences else "pairs"
    if reference:
        whole = [Span(str(path), 0, path.stat().st_size) for path in files]
        units = [[span] for span in whole] if per_file else [whole]
    else:
        units = plan_units(files, max(1, int(unit_mb * (1 << 20))))
    plan = Preparation(
        mode=mode,
        max_seq_length=max_seq_length,
        max_predictions=max_predictions,
        masked_lm_prob=masked_lm_prob,
        short_seq_prob=short_seq_prob,
        dupe_factor=dupe_factor,
        seed=seed,
        rows_per_shard=rows_per_shard,
        lower_case=vocabulary.lower_case,
        on_error=on_error,
        units=units,
    )
    if dry_run:
        return {"files": len(files), "units": len(units)}
    work = _work_folder(out, plan, vocabulary)
    with _work_in(work, out):
        _keep_only_usable_units(work, plan)
        plan.write(work)
        vocabulary.save(work / VOCABULARY)
        numbers = [number for number in range(len(units)) if not unit_folder(work, number).is_dir()]
        report = progress or (lambda done, total: None)
        report(len(units) - len(numbers), len(units))
        for made, _ in enumerate(make_units(str(work), numbers, workers, engine, scheduler), start=1):
            report(len(units) - len(numbers) + made, len(units))
        summaries = [Summary.read(unit_folder(work, number)) for number in range(len(units))]
        counts = _total(summary.counts for summary in summaries)
        try:
            _check_text(counts, vocab)
        except UserError:
            shutil.rmtree(work)  # there is nothing to resume
            raise
        description = _describe(plan, files, unreadable, counts)
        if not reference:
            description["unit_mb"] = unit_mb
            description |= {name: value for name, value in recorded.items() if value is not None}
        if per_file:
            description["rows_per_input"] = [sum(file["rows"] for file in summary.files) for summary in summaries]
        manifest = _assemble(work, out, vocabulary, summaries, description)
    if (mean := manifest["tokens"] / manifest["rows"]) < max_seq_length / 4 and not reference:
        sentences = counts["sentences"] / counts["documents"]
        warn(
            f"an example has only {mean:.0f} tokens, since a document has {sentences:.1f} sentences on average; if "
            f"paragraphs were taken for documents, {_CURE}"
        )
    return manifest


def _usable(files: list[Path], on_error: OnError, reference: bool) -> tuple[list[Path], list[Path]]:
    """The readable files, and the unreadable ones, which are refused unless `on_error` is skip."""
    usable, unreadable = [], []
    for path in files:
        try:
            check_readable(path, as_reference=reference)
            usable.append(path.resolve())
        except UserError:
            if on_error != "skip":
                raise
            unreadable.append(path)
    if not usable:
        raise UserError("empty-input", f"none of the {counted(len(files), 'input file')} can be read as text")
    return usable, unreadable


def _check_text(counts: Counter[str], vocab: str | Path | None) -> None:
    if not counts["tokens"]:
        raise UserError("no-example", "the input contains no text; give one sentence per line")
    if counts["unknown_tokens"] > UNKNOWN_LIMIT * counts["tokens"]:
        share = counts["unknown_tokens"] / counts["tokens"]
        raise UserError(
            "other-vocabulary",
            f"{share:.0%} of the text is not in {vocab or 'the vocabulary'}; use a vocabulary for this text, and "
            "--lower-case or --cased to match it",
        )


def _describe(plan: Preparation, files: list[Path], unreadable: list[Path], counts: Counter[str]) -> dict[str, Any]:
    description: dict[str, Any] = {
        "inputs": [file.name for file in files],
        "mode": plan.mode,
        "max_seq_length": plan.max_seq_length,
        "dupe_factor": plan.dupe_factor,
        "seed": plan.seed,
        "text": {name: counts[name] for name in sorted(counts)},
    }
    if plan.mode != "full-sentences":
        description["short_seq_prob"] = plan.short_seq_prob
    if plan.mode == "reference":
        description |= {"max_predictions": plan.max_predictions, "masked_lm_prob": plan.masked_lm_prob}
    if unreadable:
        description["skipped_inputs"] = [file.name for file in unreadable]
    return description


def _work_folder(out: Path, plan: Preparation, vocabulary: Vocabulary) -> Path:
    """The work folder of this result; its name is a hash of everything that the result depends on."""
    sources = {span.path: Path(span.path).stat() for unit in plan.units for span in unit}
    everything = [
        vars(plan) | {"on_error": None},
        vocabulary.hash,
        [(path, stat.st_size, stat.st_mtime_ns) for path, stat in sources.items()],
        SCHEMA_VERSION,
        unicodedata.unidata_version,
    ]
    key = hashlib.sha256(json.dumps(everything).encode()).hexdigest()[:12]
    return out.resolve().parent / f".{out.name}.work-{key}"


@contextmanager
def _work_in(work: Path, out: Path) -> Iterator[None]:
    """Lock the work folder. After an error it is kept only if it contains finished units."""
    with writing(out):
        work.mkdir(parents=True, exist_ok=True)
        lock = open(work / LOCK, "w")  # noqa: SIM115 - held until the end
    with lock:
        if not try_lock(lock):
            raise UserError("already-running", f"another process is preparing {out}; wait for it")
        try:
            with writing(out):
                yield
        except UserError as error:
            if next(work.glob("unit-*"), None) is None:
                shutil.rmtree(work, ignore_errors=True)
                raise error from None
            raise UserError(error.code, f"{error} (finished units are kept in {work})") from None


def _keep_only_usable_units(work: Path, plan: Preparation) -> None:
    """Remove damaged units, and with `on_error` stop those where an earlier call skipped lines."""
    for folder in work.glob(".unit-*"):  # left by workers that were killed
        shutil.rmtree(folder, ignore_errors=True)
    _take_apart(work, plan)
    for folder in work.glob("unit-*"):
        summary = Summary.find(folder)
        lost = ("lines_skipped", "lines_not_utf8")[: 1 if plan.mode == "reference" else 2]
        stops = plan.on_error == "stop" and summary is not None and any(summary.counts[name] for name in lost)
        if summary is None or stops or not summary.is_whole(folder):
            shutil.rmtree(folder)


def _take_apart(work: Path, plan: Preparation) -> None:
    """Move the shards of an interrupted assembly back into their units."""
    whole = work / WHOLE
    if not whole.is_dir():
        return
    shards = 0
    for number in range(len(plan.units)):
        folder = unit_folder(work, number)
        summary = Summary.find(folder)
        if summary is None:
            break
        for file in summary.files:
            if (whole / shard_name(shards)).exists():
                (whole / shard_name(shards)).rename(folder / file["name"])
            shards += 1
    shutil.rmtree(whole)


def _remove_work_of_other_arguments(out: Path) -> None:
    """Remove work folders of the same `out` with other arguments, unless another process uses them."""
    for work in out.resolve().parent.glob(f".{escape(out.name)}.work-*"):
        with suppress(OSError), open(work / LOCK) as lock:
            if try_lock(lock):
                shutil.rmtree(work, ignore_errors=True)


def _total(counters: Iterable[Counter[Any]]) -> Counter[Any]:
    total: Counter[Any] = Counter()
    for counter in counters:
        total.update(counter)
    return total


def _assemble(
    work: Path, out: Path, vocabulary: Vocabulary, summaries: list[Summary], description: dict[str, Any]
) -> dict[str, Any]:
    """Collect the shards of all units in one folder and rename it to `out`; can be repeated if killed at any point."""
    whole = work / WHOLE
    whole.mkdir()
    files: list[dict[str, Any]] = []
    histogram: Histogram = _total(summary.histogram for summary in summaries)
    for number, summary in enumerate(summaries):
        for file in summary.files:
            name = shard_name(len(files))
            (unit_folder(work, number) / file["name"]).rename(whole / name)
            files.append(file | {"name": name})
    has_masks = description["mode"] == "reference"
    manifest = finish_folder(whole, vocabulary, files, histogram, has_masks=has_masks, preparation=description)
    if out.exists():
        out.rmdir()
    whole.rename(out)
    shutil.rmtree(work, ignore_errors=True)
    _remove_work_of_other_arguments(out)
    return manifest
