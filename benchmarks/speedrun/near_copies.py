"""Remove near-copies of the held-out articles from the training text: other versions of an article, and stubs that
differ in a name or a year.

usage: near_copies.py TEXT    (the folder of `data extract --hold-out`, with train/ and eval.txt; train/ is rewritten)

Two articles are near-copies if one of them has at least 30 % of its sequences of 8 words in common with the other. On
four collections of Wikipedia articles few pairs lie between 10 % (a common phrase) and 50 %.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bertrain.base.files import write_atomically

Hashes = npt.NDArray[np.uint64]
WORDS, SHARE = 8, 0.3
RECORD = "near-copies.json"


def documents(path: Path) -> Iterator[str]:
    """The documents of a file with a sentence in each line and an empty line after each document."""
    return (part for part in path.read_text().split("\n\n") if part.strip())


def shingles(document: str) -> Hashes:
    """Hashes of all sequences of 8 words, or of a shorter document's words together, each once."""
    words = re.findall(r"\w+", document.lower())
    hashes = np.fromiter(map(hash, words), dtype=np.int64, count=len(words)).view(np.uint64)
    count = max(1, len(hashes) - WORDS + 1)
    found = np.zeros(count, dtype=np.uint64)
    for first in range(min(WORDS, len(hashes))):
        found = found * np.uint64(0x9E3779B97F4A7C15) + hashes[first : first + count]
    return np.unique(found)


class HeldOut:
    """The shingles of the held-out documents, to compare others with."""

    def __init__(self, texts: Iterator[str]) -> None:
        own = [shingles(text) for text in texts]
        self.sizes = np.array([len(one) for one in own])
        every, owner = np.concatenate(own), np.repeat(np.arange(len(own)), self.sizes)
        order = np.argsort(every, kind="stable")
        self._every, self._owner = every[order], owner[order]

    def largest_share(self, document: str) -> float:
        """The largest share of shingles that a held-out document has in common with this one, of either's own."""
        own = shingles(document)
        first, last = (np.searchsorted(self._every, own, side) for side in ("left", "right"))
        owners = [self._owner[a:b] for a, b in zip(first, last, strict=True) if b > a]
        if not owners:
            return 0.0
        common = np.bincount(np.concatenate(owners), minlength=len(self.sizes))
        return float((common / np.minimum(self.sizes, len(own))).max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    folder = parser.parse_args().text
    if (folder / RECORD).is_file():
        print(f"{folder}: near-copies were removed before: {(folder / RECORD).read_text().strip()}")
        return
    held_out = HeldOut(documents(folder / "eval.txt"))
    kept_count, removed = 0, list[str]()
    for path in sorted((folder / "train").glob("*.txt")):
        kept: list[str] = []
        for document in documents(path):
            is_copy = held_out.largest_share(document) >= SHARE
            (removed if is_copy else kept).append(document)
        kept_count += len(kept)
        write_atomically(path, "".join(document.strip("\n") + "\n\n" for document in kept))
    sizes = {"kept": kept_count, "removed": len(removed), "removed_bytes": sum(len(text.encode()) for text in removed)}
    write_atomically(folder / RECORD, json.dumps(sizes) + "\n")
    print(f"{folder}: {sizes}")


if __name__ == "__main__":
    main()
