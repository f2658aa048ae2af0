"""XNLI: trained in one language, usually English, and evaluated in fifteen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from bertrain.base.errors import UserError, nearest
from bertrain.config.settings import Settings
from bertrain.data.formats.block import concatenate
from bertrain.data.text.vocabulary import Vocabulary
from bertrain.tasks.glue import TASKS, stems_of
from bertrain.tasks.table_task import Columns, RowFormat, TableSplit, TableTask, class_parser
from bertrain.tasks.tables import choose_files

LABELS = TASKS["mnli"].labels
LANGUAGES = ("ar", "bg", "de", "el", "en", "es", "fr", "hi", "ru", "sw", "th", "tr", "ur", "vi", "zh")
ROWS = {"dev": 2490, "test": 5010}  # published rows in each language

ALL = "all"
LABEL_ALIASES = {"contradictory": LABELS.index("contradiction")} | {str(i): i for i in range(len(LABELS))}
PAIRS = RowFormat(
    Columns(("premise", "sentence1"), ("hypo", "sentence2", "hypothesis"), ("label", "gold_label")),
    class_parser(LABELS, LABEL_ALIASES),
    no_gold_label="-",
)  # rows in one language
MULTILINGUAL_COLUMNS = Columns(("sentence1",), ("sentence2",), ("gold_label",), ("pairID",), ("language",))


class XnliTask(TableTask):
    """XNLI in the files of its archives (XNLI-1.0, XNLI-MT-1.0), or of `datasets`, with a folder per language.

    Also takes the training data of MNLI.
    """

    def __init__(self, settings: Settings, folder: Path, vocabulary: Vocabulary) -> None:
        super().__init__(settings, vocabulary, "classify", LABELS, ("accuracy",))
        if not folder.is_dir():
            raise UserError("not-a-folder", f"--data {folder} is not a folder; name the folder that has xnli.dev.tsv")
        self.folder, self.languages = folder, parse_languages(settings.task.languages)
        self.files = {split: self._find_files(split) for split in ROWS}
        self.held_out_splits = [split for split in ROWS if self.files[split]]
        if not self.held_out_splits:
            self.notes.append(f"{folder} has neither xnli.dev.tsv nor xnli.test.tsv: there will be no evaluation")

    def load_split(self, name: str, *, with_labels: bool) -> TableSplit:
        if name == "train":
            return self.read_split(name, self._find_training_files(), PAIRS, with_labels=True)
        files = self.files[name]
        if ALL in files:
            multilingual = replace(PAIRS, columns=MULTILINGUAL_COLUMNS, languages=self.languages)
            split = self.read_split(name, files[ALL], multilingual, with_labels=True)
        else:
            parts = {of: self.read_split(name, files[of], PAIRS, with_labels=True) for of in files}
            split = replace(
                next(iter(parts.values())),
                block=concatenate([part.block for part in parts.values()]),
                ids=[index for part in parts.values() for index in part.ids],
                languages=[language for language, part in parts.items() for _ in part.ids],
            )
        found = dict.fromkeys(split.languages)
        missing = [language for language in self.languages if language not in found]
        if missing and self.settings.task.languages != ALL:
            languages = ", ".join(missing)
            raise UserError(
                "missing-language", f"the {name} part in {self.folder} lacks {languages}; change --task.languages"
            )
        published = ROWS[name] * len(found)
        if split.num_examples != published:
            rows = f"{split.num_examples:,} of the {published:,} published rows"
            self.notes.append(f"{name}: {rows} in {len(found)} languages")
        return split

    def _find_files(self, split: str) -> dict[str, list[Path]]:
        """The files of a split by language; one file with several languages is under ALL."""
        for folder in (self.folder, self.folder / "XNLI-1.0"):
            if files := choose_files(folder, [f"xnli.{split}"], self.notes):
                return {ALL: files}
        found = {of: choose_files(self.folder / of, stems_of(split), self.notes) for of in self.languages}
        return {language: files for language, files in found.items() if files}

    def _find_training_files(self) -> list[Path]:
        """MultiNLI in one language: English, or else the only other one."""
        root = self.folder
        for folder in (root, root / "multinli", root / "XNLI-MT-1.0" / "multinli", root / "en", root / "MNLI"):
            for stems in (["multinli.train.en"], ["multinli.train.*"], stems_of("train")):
                if files := choose_files(folder, stems, self.notes):
                    self.notes.append(f"train: using {files[0]}")
                    return files
        raise UserError("missing-split", f"--data {root} has neither multinli.train.en.tsv nor the train.tsv of MNLI")


def parse_languages(text: str) -> tuple[str, ...]:
    if text == ALL:
        return LANGUAGES
    chosen = tuple(dict.fromkeys(word.strip() for word in text.split(",")))
    unknown = next((language for language in chosen if language not in LANGUAGES), None)
    if unknown is not None:
        hint = nearest(unknown, list(LANGUAGES))
        raise UserError("unknown-language", f"task.languages has {unknown!r}{hint}; XNLI has {', '.join(LANGUAGES)}")
    return chosen
