"""XNLI: trained in one language, mostly English, and scored in fifteen."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from bertrain.data.tokenizer import Vocabulary
from bertrain.errors import UserError, nearest
from bertrain.settings import Settings
from bertrain.tasks.glue import TASKS, stems_of
from bertrain.tasks.rows import Columns, Maker, Reading, TableSplit, TableTask, read_class
from bertrain.tasks.tables import choose_files

LABELS = TASKS["mnli"].labels
LANGUAGES = ("ar", "bg", "de", "el", "en", "es", "fr", "hi", "ru", "sw", "th", "tr", "ur", "vi", "zh")
ROWS = {"dev": 2490, "test": 5010}
"""In each language."""

TRAINING_COLUMNS = Columns(("premise", "sentence1"), ("hypo", "sentence2", "hypothesis"), ("label", "gold_label"))
SCORED_COLUMNS = Columns(("sentence1",), ("sentence2",), ("gold_label",), ("pairID",), ("language",))


def open_xnli(settings: Settings, folder: Path, vocabulary: Vocabulary) -> TableTask:
    """XNLI of `folder`, as its archives have it (XNLI-1.0, XNLI-MT-1.0), or with MNLI's training data."""
    if not folder.is_dir():
        raise UserError(f"--data {folder} is no folder; give that of xnli.dev.tsv and multinli.train.en.tsv")
    languages = parse_languages(settings.task.languages)
    notes: list[str] = []
    maker = Maker(settings, vocabulary, "classify", LABELS, ("accuracy",), notes)
    read_label = read_class(LABELS, also={"contradictory": LABELS.index("contradiction")})
    files = {split: _find_scored(folder, split, notes) for split in ROWS}
    if not any(files.values()):
        notes.append(f"there is neither xnli.dev.tsv nor xnli.test.tsv in {folder}: nothing will be scored")

    def train() -> TableSplit:
        found = _find_training(folder, notes)
        return maker.read("train", found, Reading(TRAINING_COLUMNS, read_label, undecided="-"), with_answers=True)

    def score(split: str) -> TableSplit:
        reading = Reading(SCORED_COLUMNS, read_label, languages=languages)
        found = maker.read(split, files[split], reading, with_answers=True)
        spoken = dict.fromkeys(found.languages)
        absent = [language for language in languages if language not in spoken]
        if absent and settings.task.languages != "all":
            raise UserError(f"{files[split][0]} has no rows in {', '.join(absent)}; see --task.languages")
        if found.num_examples != ROWS[split] * len(spoken):
            notes.append(
                f"{split}: {files[split][0]} has {found.num_examples:,} rows in {len(spoken)} languages, of the "
                f"{ROWS[split] * len(spoken):,} published"
            )
        return found

    return TableTask(
        name=settings.task.name,
        head="classify",
        labels=LABELS,
        main_figure="accuracy",
        notes=notes,
        load_training=train,
        load_held_out={split: partial(score, split) for split in ROWS if files[split]},
        load_unanswered={},
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


def _find_scored(folder: Path, split: str, notes: list[str]) -> list[Path]:
    for place in (folder, folder / "XNLI-1.0"):
        if found := choose_files(place, [f"xnli.{split}"], notes):
            return found
    return []


def _find_training(folder: Path, notes: list[str]) -> list[Path]:
    """MultiNLI in one language: English, if it is there; otherwise the only other one."""
    places = (folder, folder / "multinli", folder / "XNLI-MT-1.0" / "multinli", folder / "MNLI")
    for place in places:
        for stems in (["multinli.train.en"], ["multinli.train.*"], stems_of("train")):
            if found := choose_files(place, stems, notes):
                notes.append(f"train: {found[0]}")
                return found
    raise UserError(f"there is no multinli.train.en.tsv, nor MNLI's train.tsv, in --data {folder}")
