"""Makes the folder of a model that stays in the repository, from its export and its record in speedrun.json.

    bertrain weights export RUN --precision fp16 --out EXPORTED
    python benchmarks/speedrun/keep.py EXPORTED "NAME OF THE RECORD" models/bert-mini

The weights are split into files of at most 16 MiB, as Transformers splits large models, and the card gets what the
record says: the machine, the command, and the results on the held-out articles.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from table import RESULTS, mean_of
from torch import Tensor

from bertrain.base.formatting import show_brief
from bertrain.weights.card import PRETRAINING
from bertrain.weights.huggingface import CARD, INDEX, MODEL

LARGEST_FILE = 16 * 2**20
NOT_EVALUATED = "## Results\n\nIt was not evaluated on held-out examples.\n"
TEXT = (
    "The text is English Wikipedia (CC BY-SA 4.0): 23,142 articles, without those held out and their near-copies; "
    "[the speedrun](../../benchmarks/speedrun/README.md) says how to make it. "
)


def num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def split(tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """The tensors in their order, in as few files as that allows."""
    files: list[dict[str, Tensor]] = [{}]
    for name, tensor in tensors.items():
        header = 100 * (len(files[-1]) + 2)  # safetensors' own line of each tensor, with room to spare
        if sum(map(num_bytes, files[-1].values())) + num_bytes(tensor) + header > LARGEST_FILE:
            files.append({})
        files[-1][name] = tensor
    return files


def write_weights(tensors: dict[str, Tensor], folder: Path) -> None:
    files, stem = split(tensors), Path(MODEL).stem
    names = [f"{stem}-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
    for name, part in zip(names, files, strict=True):
        save_file(part, folder / name, metadata={"format": "pt"})
    places = {tensor: name for name, part in zip(names, files, strict=True) for tensor in part}
    index = {"metadata": {"total_size": sum(map(num_bytes, tensors.values()))}, "weight_map": places}
    (folder / (MODEL + INDEX)).write_text(json.dumps(index, indent=1) + "\n")


def describe(card: str, record: dict[str, Any]) -> str:
    """The card of an export, with what the record of the speedrun knows."""
    assert NOT_EVALUATED in card, "the card has results of its own"
    made = f"It was trained in {record['seconds']:.0f} seconds on one {record['gpu']}, by this command:\n\n"
    command = f"```sh\nbertrain pretrain {' '.join(record['request'])} --data wiki/data --run runs/mini\n```\n\n"
    held_out = record["held_out"]
    rows = [f"| {label} | {show_brief(name, held_out[name])} |" for name, label in PRETRAINING.items()]
    if "tasks" in record:
        rows.append(f"| mean of six tasks of GLUE | {mean_of(record['tasks'])} |")
    results = f"## Results on {held_out['examples']:,.0f} held-out examples\n\n| what | value |\n| --- | --- |\n"
    card = card.replace("## Training\n\n", f"## Training\n\n{TEXT}{made}{command}")
    return card.replace(NOT_EVALUATED, results + "\n".join(rows) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("exported", type=Path)
    parser.add_argument("record")
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    (record,) = [one for one in json.loads(RESULTS.read_text()) if one["name"] == options.record]
    options.out.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "vocab.txt"):
        shutil.copy(options.exported / name, options.out)
    write_weights(load_file(options.exported / MODEL), options.out)
    (options.out / CARD).write_text(describe((options.exported / CARD).read_text(), record))


if __name__ == "__main__":
    main()
