"""XNLI: trained in one language, mostly English, and scored in fifteen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from bertrain.base.errors import UserError, nearest
from bertrain.config.settings import Settings
from bertrain.data.formats.block import concatenate
from bertrain.data.text.vocabulary import Vocabulary
from bertrain.tasks.glue import TASKS, stems_of
from bertrain.tasks.rows import Columns, Maker, Reading, TableSplit, TableTask, read_class
from bertrain.tasks.tables import choose_files

LABELS = TASKS["mnli"].labels
LANGUAGES = ("ar", "bg", "de", "el", "en", "es", "fr", "hi", "ru", "sw", "th", "tr", "ur", "vi", "zh")
ROWS = {"dev": 2490, "test": 5010}
"""In each language."""

MIXED = "all"
PAIR_COLUMNS = Columns(("premise", "sentence1"), ("hypo", "sentence2", "hypothesis"), ("label", "gold_label"))
SCORED_COLUMNS = Columns(("sentence1",), ("sentence2",), ("gold_label",), ("pairID",), ("language",))


def open_xnli(settings: Settings, folder: Path, vocabulary: Vocabulary) -> TableTask:
    """XNLI of `folder`, as its archives have it (XNLI-1.0, XNLI-MT-1.0), or as `datasets` does, a folder a language;
    also with MNLI's training data.
    """
    if not folder.is_dir():
        raise UserError(f"--data {folder} is no folder; give that of xnli.dev.tsv and multinli.train.en.tsv")
    languages = parse_languages(settings.task.languages)
    notes: list[str] = []
    maker = Maker(settings, vocabulary, "classify", LABELS, ("accuracy",), notes)
    also = {"contradictory": LABELS.index("contradiction")} | {str(i): i for i in range(len(LABELS))}
    plain = Reading(PAIR_COLUMNS, read_class(LABELS, also), undecided="-")
    files = {split: _find_scored(folder, split, languages, notes) for split in ROWS}
    if not any(files.values()):
        notes.append(f"there is neither xnli.dev.tsv nor xnli.test.tsv in {folder}: nothing will be scored")

    def train() -> TableSplit:
        return maker.read("train", _find_training(folder, notes), plain, with_answers=True)

    def score(split: str) -> TableSplit:
        if MIXED in files[split]:
            reading = replace(plain, columns=SCORED_COLUMNS, languages=languages)
            found = maker.read(split, files[split][MIXED], reading, with_answers=True)
        else:
            parts = {of: maker.read(split, those, plain, with_answers=True) for of, those in files[split].items()}
            found = _join(parts)
        spoken = dict.fromkeys(found.languages)
        absent = [language for language in languages if language not in spoken]
        if absent and settings.task.languages != "all":
            raise UserError(f"{split} of {folder} has no rows in {', '.join(absent)}; see --task.languages")
        published = ROWS[split] * len(spoken)
        if found.num_examples != published:
            notes.append(
                f"{split}: {found.num_examples:,} rows in {len(spoken)} languages of the {published:,} published"
            )
        return found

    return TableTask(
        name=settings.task.name,
        head="classify",
        labels=LABELS,
        main_metric="accuracy",
        notes=notes,
        load_training=train,
        load_held_out={split: partial(score, split) for split in ROWS if files[split]},
        load_unanswered={},
    )


def _join(parts: Mapping[str, TableSplit]) -> TableSplit:
    """Splits of one language each as one of many."""
    return replace(
        next(iter(parts.values())),
        block=concatenate([part.block for part in parts.values()]),
        ids=[identity for part in parts.values() for identity in part.ids],
        languages=[language for language, part in parts.items() for _ in part.ids],
    )


def parse_languages(text: str) -> tuple[str, ...]:
    """The languages of `task.languages`: all of them, or those that are listed."""
    if text == "all":
        return LANGUAGES
    chosen = tuple(dict.fromkeys(word.strip() for word in text.split(",")))
    for language in chosen:
        if language not in LANGUAGES:
            hint = nearest(language, list(LANGUAGES))
            raise UserError(f"task.languages has {language!r}{hint}; XNLI is in {', '.join(LANGUAGES)}")
    return chosen


def _find_scored(folder: Path, split: str, languages: Sequence[str], notes: list[str]) -> dict[str, list[Path]]:
    """The files of a split: one of all languages, under MIXED, or those of each language."""
    for place in (folder, folder / "XNLI-1.0"):
        if found := choose_files(place, [f"xnli.{split}"], notes):
            return {MIXED: found}
    apart = {language: choose_files(folder / language, stems_of(split), notes) for language in languages}
    return {language: files for language, files in apart.items() if files}


def _find_training(folder: Path, notes: list[str]) -> list[Path]:
    """MultiNLI in one language: English, if it is there; otherwise the only other one."""
    places = (folder, folder / "multinli", folder / "XNLI-MT-1.0" / "multinli", folder / "en", folder / "MNLI")
    for place in places:
        for stems in (["multinli.train.en"], ["multinli.train.*"], stems_of("train")):
            if found := choose_files(place, stems, notes):
                notes.append(f"train: {found[0]}")
                return found
    raise UserError(f"there is no multinli.train.en.tsv, nor MNLI's train.tsv, in --data {folder}")
