"""How fast one core turns text into shards, by itself and against the plain reference, and in how much memory.

    python -m benchmarks.prepare [--text FILE.tar.xz] [--largest-mb 1000]

The text is WikiExtractor's output in an archive, or the articles of demo/ over and over; sentences are split at full
stops. Larger texts repeat it, so their words are no rarer than those of the first 100 MB. The reference is the plain
Python twin of MLPerf's script in tests/plain_reference.py, which does not even write its rows. Everything runs on one
core, one after another. Writes benchmarks/results/prepare.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bertrain.base.machine import cpu_name
from bertrain.data.text.vocabulary import Vocabulary
from tests import plain_reference

HERE = Path(__file__).parent
WIKIPEDIA_BYTES, CORES = 13e9, 16
REFERENCE_MB, TURNS = 4, 3

MEASURE = """
import json, pathlib, re, sys, time
from bertrain.data.prepare.prepare import prepare
arguments = json.loads(sys.argv[1])
wall, cpu = time.perf_counter(), time.process_time()
manifest = prepare(**arguments)
status = pathlib.Path("/proc/self/status").read_text()  # ru_maxrss would count the parent that forked us
print(json.dumps({
    "wall_s": time.perf_counter() - wall,
    "cpu_s": time.process_time() - cpu,
    "peak_mb": int(re.search(r"VmHWM:\\s+(\\d+) kB", status)[1]) * 1024 / 1e6,
    "rows": manifest["rows"],
    "tokens": manifest["tokens"],
    "disk_mb": sum(file["bytes"] for file in manifest["files"]) / 1e6,
}))
"""


def documents(archive: Path | None) -> Iterator[str]:
    """Documents, a sentence a line; without an archive those of demo/, without end."""
    while archive is None:
        for path in sorted((HERE.parent / "demo").glob("train-*.txt")):
            yield from path.read_text(encoding="utf-8").split("\n\n")
    with tarfile.open(archive) as members:
        for member in members:
            content = members.extractfile(member)
            if content is None:
                continue
            for article in re.findall(r"<doc[^>]*>\n(.*?)</doc>", content.read().decode(errors="ignore"), re.DOTALL):
                lines = [line.strip().replace(". ", ".\n") for line in article.split("\n")]
                yield "\n".join(line for line in lines if line)


def write_text(path: Path, archive: Path | None, megabytes: float) -> float:
    """Write about so many MB of text; returns how many they are."""
    with open(path, "wb") as file:
        for document in documents(archive):
            file.write(document.encode() + b"\n\n")
            if file.tell() >= megabytes * 1e6:
                break
        else:
            file.flush()
            once = path.read_bytes()
            while file.tell() < megabytes * 1e6:
                file.write(once)
        return file.tell() / 1e6


def measure(**arguments: Any) -> dict[str, float]:
    """Prepare in a process of its own."""
    command = [sys.executable, "-c", MEASURE, json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def against_the_reference(folder: Path, archive: Path | None) -> dict[str, Any]:
    """MB of text a second of --reference at dupe 10, and of its plain twin, on the same text, by turns."""
    text = folder / "reference.txt"
    megabytes = write_text(text, archive, REFERENCE_MB)
    vocabulary = {word: number for number, word in enumerate(Vocabulary.load().words)}
    ours, twins = [], []
    for turn in range(TURNS):
        ours.append(measure(inputs=[str(text)], out=str(folder / f"reference-{turn}"), reference=True, dupe_factor=10))
        began = time.process_time()
        rows = plain_reference.instances(
            [text], vocabulary, max_seq_length=512, max_predictions=76, dupe_factor=10, seed=12345
        )
        twins.append(time.process_time() - began)
        assert len(rows) == ours[-1]["rows"]
    return {
        "text_mb": megabytes,
        "rows": ours[0]["rows"],
        "peak_mb": max(one["peak_mb"] for one in ours),
        "ours_cpu_s": [one["cpu_s"] for one in ours],
        "plain_twin_cpu_s": twins,
        "ours_mb_per_s": megabytes / min(one["cpu_s"] for one in ours),
        "plain_twin_mb_per_s": megabytes / min(twins),
        "ratio": min(twins) / min(one["cpu_s"] for one in ours),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="a tar archive of WikiExtractor's output")
    parser.add_argument("--largest-mb", type=float, default=1000)
    given = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        reference = against_the_reference(folder, given.text)
        print(
            f"--reference at dupe 10: {reference['ours_mb_per_s']:.2f} MB/s, {reference['ratio']:.1f} x the plain twin"
        )
        sizes = []
        for megabytes in (10, 100, 1000):
            if megabytes > given.largest_mb:
                break
            text = folder / f"{megabytes}.txt"
            written = write_text(text, given.text, megabytes)
            one = measure(inputs=[str(text)], out=str(folder / f"{megabytes}"))
            sizes.append(one | {"text_mb": written, "mb_per_s": written / one["cpu_s"]})
            print(f"{written:,.0f} MB: {sizes[-1]['mb_per_s']:.1f} MB/s of CPU time, peak {one['peak_mb']:.0f} MB")
            text.unlink()
    largest = sizes[-1]
    whole = {
        "text_gb": WIKIPEDIA_BYTES / 1e9,
        "cores": CORES,
        "minutes": WIKIPEDIA_BYTES / 1e6 / largest["mb_per_s"] / CORES / 60,
        "disk_gb": WIKIPEDIA_BYTES / 1e6 / largest["text_mb"] * largest["disk_mb"] / 1e3,
        "memory_gb": CORES * largest["peak_mb"] / 1e3,
    }
    result = {
        "what": "one core: text in, shards on disk, 512 tokens, dupe 1; rates by CPU time, since the machine is shared",
        "text": given.text.name if given.text else "demo",
        "default": sizes,
        "default_over_reference_twin": largest["mb_per_s"] / reference["plain_twin_mb_per_s"],
        "reference_dupe_10": reference,
        "wikipedia_extrapolated": whole,
        "machine": {"cpu": cpu_name(), "python": platform.python_version()},
    }
    (HERE / "results" / "prepare.json").write_text(json.dumps(result, indent=1) + "\n")
    print(
        f"{whole['text_gb']:.0f} GB of text on {CORES} cores: {whole['minutes']:.0f} min, {whole['disk_gb']:.1f} GB on "
        f"disk, {whole['memory_gb']:.1f} GB of memory"
    )


if __name__ == "__main__":
    main()
