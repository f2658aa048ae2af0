"""Writes tests/data/datasets: rows of CoLA as the library `datasets` saves them, in its three ways.

Run once, with `datasets` installed, from the root of the repository: python tests/data/make_datasets.py
"""

from __future__ import annotations

from pathlib import Path

from datasets import ClassLabel, Dataset, DatasetDict, Features, Value

HERE = Path(__file__).parent
FEATURES = Features(
    {"sentence": Value("string"), "label": ClassLabel(names=["unacceptable", "acceptable"]), "idx": Value("int32")}
)


def main() -> None:
    splits = DatasetDict()
    for name, file in (("train", "train.tsv"), ("validation", "dev.tsv"), ("test", "test.tsv")):
        rows = [line.split("\t") for line in (HERE / "glue/CoLA" / file).read_text().splitlines()]
        rows = rows[1:] if name == "test" else rows
        columns = {
            "sentence": [row[-1] for row in rows],
            "label": [-1 if name == "test" else int(row[1]) for row in rows],
            "idx": list(range(len(rows))),
        }
        splits[name] = Dataset.from_dict(columns, features=FEATURES)
    out = HERE / "datasets"
    splits.save_to_disk(out / "saved" / "cola")
    for name, split in splits.items():
        (out / "parquet" / "cola").mkdir(parents=True, exist_ok=True)
        (out / "json" / "cola").mkdir(parents=True, exist_ok=True)
        split.to_parquet(out / "parquet" / "cola" / f"{name}-00000-of-00001.parquet")
        split.to_json(out / "json" / "cola" / f"{name}.jsonl")


if __name__ == "__main__":
    main()
