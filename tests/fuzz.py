"""Mutates files of every kind that bertrain reads, and reads them: a UserError or a result, nothing else, and soon.

    python -m tests.fuzz --seconds 600 --seed 1 [--processes 8] [--output FILE] [READER ...]

prints one line for each reader, and what it did wrong with the mutation that repeats it. Every process reads all files
with a seed of its own, and `--output` adds what they came to, to the list in FILE.
"""

from __future__ import annotations

import argparse
import bz2
import gzip
import json
import lzma
import os
import platform
import random
import re
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
from safetensors import safe_open

from bertrain.base.errors import UserError
from bertrain.base.logs import logs
from bertrain.config.resolve import resolve
from bertrain.data.formats.source import open_data
from bertrain.data.formats.verify import read_checksums
from bertrain.data.text.extract import estimate
from bertrain.data.text.vocabulary import Vocabulary
from bertrain.launch.job import JobSpec, Task, make_job, place, read_hostfile, read_job, write_job
from bertrain.launch.scripts import job_script
from bertrain.launch.submit import job_status
from bertrain.mlperf.check import check_results
from bertrain.mlperf.show import show_logs
from bertrain.planning.devices import NETWORK_KEYS, find_gpu, find_network
from bertrain.profiling.profile_report import profile_report
from bertrain.reports import history
from bertrain.reports.report import report
from bertrain.reports.watch import describe, look
from bertrain.run import checkpoint
from bertrain.run.folder import Run
from bertrain.run.records import drop_after
from bertrain.tasks.registry import open_task
from bertrain.tasks.score import score
from bertrain.tasks.squad.files import read_squad
from bertrain.tasks.tables import read_table
from bertrain.training.vector_files import VectorFile
from bertrain.weights.card import model_card
from bertrain.weights.companions import find_vocabulary
from bertrain.weights.sentence_transformers import SentencePipeline, read_pipeline, write_pipeline
from bertrain.weights.source import read_weights
from tests import miniature_tasks
from tests.bpe import ROBERTA_LIKE, write_bpe

HERE = Path(__file__).parent
WRITTEN, GOLDEN = HERE / "data" / "written-by-8764bd3", HERE / "golden"
SLOW_S = 3.0
"""CPU time that none of these small files may take."""
DEEP = b"[" * 100_000


@dataclass(frozen=True)
class Reader:
    name: str
    target: str
    """The file that is mutated, in a copy of `source`."""
    read: Callable[[Path], object]
    """Reads the copy."""
    source: Path | Callable[[Path], object]
    """A folder, or a function that fills one."""


@dataclass(frozen=True)
class Finding:
    reader: str
    what: str
    content: bytes


# --- mutations ---------------------------------------------------------------------------------------------------


def mutate(content: bytes, draw: random.Random) -> bytes:
    """One to three changes of a file."""
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        content = draw.choice(MUTATIONS)(content, draw)
    return content


def _span(content: bytes, draw: random.Random, longest: int = 64) -> tuple[int, int]:
    begin = draw.randrange(len(content) + 1)
    return begin, min(len(content), begin + draw.randrange(1, longest))


def _truncate(content: bytes, draw: random.Random) -> bytes:
    return content[: draw.randrange(len(content) + 1)]


def _flip(content: bytes, draw: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(draw.choice((1, 1, 4, 32))):
        if changed:
            # Headers decide more than contents do.
            place = draw.randrange(len(changed) if draw.random() < 0.5 else min(512, len(changed)))
            changed[place] ^= 1 << draw.randrange(8)
    return bytes(changed)


def _insert(content: bytes, draw: random.Random) -> bytes:
    begin, _ = _span(content, draw)
    return content[:begin] + draw.randbytes(draw.choice((1, 4, 16))) + content[begin:]


def _delete(content: bytes, draw: random.Random) -> bytes:
    begin, end = _span(content, draw)
    return content[:begin] + content[end:]


def _repeat(content: bytes, draw: random.Random) -> bytes:
    begin, end = _span(content, draw, 256)
    return content[:end] + content[begin:end] * draw.choice((1, 10, 1000)) + content[end:]


def _change_integer(content: bytes, draw: random.Random) -> bytes:
    """Write an extreme number over eight, four or two bytes of a binary file."""
    size = draw.choice((2, 4, 8))
    begin = draw.randrange(max(1, min(len(content), draw.choice((256, len(content) or 1)))))
    number = draw.choice((0, 1, 2 ** (8 * size - 1), 2 ** (8 * size) - 1, 2 ** (8 * size - 1) - 1, 2 ** (4 * size)))
    return content[:begin] + number.to_bytes(size, draw.choice(("little", "big"))) + content[begin + size :]


VALUES = (
    b"null", b"NaN", b"-1", b"1e999", b"9" * 5000, b"9" * 400, b"-9223372036854775809", b"18446744073709551616",
    b"true", b'""', b'"x"', b"[]", b"{}", b"[null]", b'{"a":1}', b"0", b"1.5", DEEP, DEEP + b"]" * len(DEEP),
    b'"\\ud800"', b"[" * 200 + b"]" * 200, b'{"a":' * 60 + b"1" + b"}" * 60,
)  # fmt: skip


def _change_value(content: bytes, draw: random.Random) -> bytes:
    """Replace a number, string or word of a text by a value of another kind."""
    found = list(re.finditer(rb'"[^"\n]{0,80}"|-?\d[\d.eE+-]*|true|false|null', content[:200_000]))
    if not found:
        return _insert(content, draw)
    chosen = draw.choice(found)
    return content[: chosen.start()] + draw.choice(VALUES) + content[chosen.end() :]


def _drop_key(content: bytes, draw: random.Random) -> bytes:
    """Rename a key of JSON, or a name of another text."""
    found = list(re.finditer(rb'"\w+"(?=\s*:)', content[:200_000]))
    if not found:
        return _delete(content, draw)
    chosen = draw.choice(found)
    return content[: chosen.start()] + b'"other"' + content[chosen.end() :]


def _replace(content: bytes, draw: random.Random) -> bytes:
    """Another value for the whole text: it has neither the keys nor the kind that are looked for."""
    return draw.choice(VALUES)


MUTATIONS = (
    _truncate, _flip, _flip, _insert, _delete, _repeat, _change_integer, _change_value, _change_value, _drop_key,
    _replace,
)  # fmt: skip


# --- what is read ------------------------------------------------------------------------------------------------


def _whole_run(folder: Path) -> None:
    """A run with lines of every kind, logs and telemetry."""
    shutil.copytree(WRITTEN / "pretrained", folder / "run")
    ranks = [{"rank": rank, "host": "a", "tokens": 9.5, "seconds": dict.fromkeys(PHASES, 0.1)} for rank in (0, 1)]
    with open(folder / "run" / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"kind": "ranks", "step": 8, "ranks": ranks}) + "\n")
    columns = "time,power_w,temperature_c,energy_j\n"
    lines = [f"{1.7e9 + second},{200 + second},50,{second * 200}\n" for second in range(30)]
    (folder / "run" / "telemetry.csv").write_text(columns + "".join(lines))
    notes = {"started": 1.7e9, "host": "a", "device": {"uuid": "GPU-1"}, "missing": {"sm_clock_mhz": "not there"}}
    (folder / "run" / "telemetry.json").write_text(json.dumps([notes]))
    (folder / "run" / "logs").mkdir()
    entry = {"time": 1.7e9, "level": "warning", "event": "start", "text": "words"}
    (folder / "run" / "logs" / "rank-0.jsonl").write_text(f"{json.dumps(entry)}\n" * 5)


PHASES = ("data", "forward_backward", "reduction", "optimizer")


def _watch(folder: Path) -> None:
    describe(look(folder / "run"))
    list(logs(folder / "run"))
    history.read(folder / "run", "run").summary  # noqa: B018 - computed when asked for


def _report(folder: Path) -> None:
    report([folder / "run"], out=folder / "report.html")


def _resume(folder: Path) -> None:
    run = Run.open(folder / "run")
    run.vocabulary()
    found, _ = checkpoint.newest_whole(run.checkpoints)
    if found:
        checkpoint.read_checkpoint(found)


def _read_checkpoint(folder: Path) -> None:
    """Read past the manifest, as after a check of sizes alone."""
    place = folder / "run" / "checkpoints" / "step-00000008"
    checkpoint.find_damage(place, hashes=False)
    checkpoint.read_checkpoint(place)


def _read_data(folder: Path, data: str = "data") -> None:
    opened = open_data(folder / data, verify="size", quiet=True)
    rows = np.arange(min(len(opened), 50))
    opened.read(rows)


def _copy(source: Path, name: str) -> Callable[[Path], object]:
    copy = shutil.copytree if source.is_dir() else shutil.copyfile
    return lambda folder: copy(source, folder / name)  # type: ignore[operator]


def _indexed(source: Path) -> Callable[[Path], object]:
    def fill(folder: Path) -> None:
        (folder / "data").mkdir()
        shutil.copyfile(source, folder / "data" / source.name)
        shutil.copyfile(HERE.parent / "bertrain" / "data" / "text" / "vocab-uncased.txt", folder / "data" / "vocab.txt")
        open_data(folder / "data", quiet=True)

    return fill


def _hdf5(layout: str) -> Callable[[Path], object]:
    def fill(folder: Path) -> None:
        from bertrain.data.formats.convert import convert

        convert(WRITTEN / "shards", folder / "data", to=layout, seed=1)  # type: ignore[arg-type]
        min((folder / "data").glob("*.hdf5")).rename(folder / "data" / "one.hdf5")

    return fill


def _job(folder: Path) -> None:
    placed = place("slurm", JobSpec(nodes=2, gpus_per_node=4))
    job = make_job(placed, [Task(command=("pretrain", "x"), folder=str(folder / "run"))], folder=folder / "job")
    write_job(job, resolve("bert-tiny", {}), job_script(job))


def _text(name: str, pack: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(pack((GOLDEN / "sample.txt").read_bytes()))


def _write(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


def _table(folder: Path, name: str) -> None:
    list(read_table(folder / name, lambda names: names[:2]))


def _score(folder: Path) -> None:
    score("squad/v1.1", HERE / "data" / "squad" / "dev-v1.1.json", folder / "predictions.json")


def _squad_answers(folder: Path) -> None:
    ids = re.findall(r'"id": ?"(\w+)"', (HERE / "data" / "squad" / "dev-v1.1.json").read_text())
    (folder / "predictions.json").write_text(json.dumps(dict.fromkeys(ids, "words")))


def _bpe(folder: Path) -> None:
    """A tokenizer.json, and the same words and merges in two files."""
    model = json.loads(write_bpe(folder / "bpe", size=300, special=ROBERTA_LIKE).read_text())["model"]
    (folder / "split").mkdir()
    (folder / "split" / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "split" / "merges.txt").write_text("".join(" ".join(pair) + "\n" for pair in model["merges"]))


def _read_words(folder: Path) -> None:
    words = find_vocabulary(folder)
    assert words is not None
    words.hash, words.continues_word  # noqa: B018 - computed when asked for


def _several_files(folder: Path) -> None:
    """Weights with an index, as larger models have them."""
    part = "model-00001-of-00001.safetensors"
    shutil.copytree(WRITTEN / "exported", folder / "exported")
    (folder / "exported" / "model.safetensors").rename(folder / "exported" / part)
    with safe_open(folder / "exported" / part, "pt") as file:
        index = {"metadata": {}, "weight_map": dict.fromkeys(file.keys(), part)}
    (folder / "exported" / "model.safetensors.index.json").write_text(json.dumps(index))


def _sentences(folder: Path) -> None:
    (folder / "model").mkdir()
    write_pipeline(folder / "model", SentencePipeline("mean", True, 64), 32)


def _vectors(folder: Path) -> None:
    (folder / ".v.npy.partial").mkdir()
    (folder / ".v.npy.partial" / "job.json").write_text(json.dumps(VECTORS))


VECTORS = {"texts": "a", "id": None, "layers": 2}


def _task(name: str, file: str, write: Callable[[int, int], str], **settings: object) -> Reader:
    def fill(folder: Path) -> None:
        (folder / "table").mkdir()
        for split in ("train", "dev"):
            (folder / "table" / file.format(split)).write_text(write(40, 1))

    def read(folder: Path) -> None:
        words = Vocabulary.load(WRITTEN / "exported" / "vocab.txt")
        task = open_task(miniature_tasks.settings_for(name, **settings), folder / "table", words)
        task.training()
        task.held_out()

    return Reader(f"task: {file.format('train')}", f"table/{file.format('train')}", read, fill)


def readers() -> list[Reader]:
    saved = "run/checkpoints/step-00000008"
    index = "data/.bertrain-index/index.json"
    google, graphcore = GOLDEN / "google-mlperf.tfrecord", GOLDEN / "graphcore-packed.tfrecord"
    datasets, set_ = HERE / "data" / "datasets", "set/node-cuda0/repeat-1"
    recipe = 'about = "x"\nbase = "bert-tiny"\n[optimizer]\nlearning_rate = 0.001\n[train]\nmax_steps = 10\n'
    return [
        *(Reader(f"{command}: {name}", f"run/{name}", read, _whole_run)
          for command, read in {"watch": _watch, "report": _report}.items()
          for name in ("config.json", "environment.json", "metrics.jsonl", "telemetry.csv", "telemetry.json",
                       "logs/rank-0.jsonl")),
        Reader("profile: metrics.jsonl", "run/metrics.jsonl",
               lambda at: profile_report([at / "run"], out=at / "page.html"), _whole_run),
        Reader("card: metrics.jsonl", "run/metrics.jsonl", lambda at: model_card(Run.open(at / "run")), _whole_run),
        Reader("metrics at a resume", "run/metrics.jsonl", lambda at: drop_after(at / "run" / "metrics.jsonl", 5, 3),
               _whole_run),
        *(Reader(f"resume: {name}", f"run/{name}", _resume, _whole_run)
          for name in ("config.json", "vocab.txt", "checkpoints/step-00000008/manifest.json")),
        *(Reader(f"checkpoint: {name}", f"{saved}/{name}", _read_checkpoint, _whole_run)
          for name in ("state.json", "model.safetensors", "optimizer.safetensors", "manifest.json")),
        *(Reader(f"shards: {name}", f"data/{name}", _read_data, _copy(WRITTEN / "shards", "data"))
          for name in ("manifest.json", "shard-00000.arrow", "vocab.txt")),
        Reader("index of TFRecords", index, _read_data, _indexed(google)),
        Reader("lengths of an index", "data/.bertrain-index/lengths.bin", _read_data, _indexed(google)),
        Reader("TFRecord", f"data/{google.name}", _read_data, _indexed(google)),
        Reader("packed TFRecord", f"data/{graphcore.name}", _read_data, _indexed(graphcore)),
        *(Reader(layout, "data/one.hdf5", _read_data, _hdf5(layout))
          for layout in ("hdf5-fixed", "hdf5-varlength")),
        Reader("job.json", "job/job.json", lambda at: (job_script(read_job(at / "job")), job_status(at / "job")), _job),
        Reader("hostfile", "hosts", lambda at: read_hostfile(at / "hosts", 4, 0),
               _write("hosts", "node1 slots=8\nnode2\n# words\n")),
        Reader("recipe", "my.toml", lambda at: resolve(str(at / "my.toml"), {}), _write("my.toml", recipe)),
        Reader("network", "own.toml", lambda at: find_network(str(at / "own.toml"), find_gpu("a100"), 8),
               _write("own.toml", "".join(f"{key} = 30.5\n" for key in sorted(NETWORK_KEYS)))),
        Reader("bert_config.json", "tf1/bert_config.json",
               lambda at: resolve("bert-tiny", {"model.config": str(at / "tf1" / "bert_config.json")}),
               _copy(GOLDEN / "tf1-google", "tf1")),
        Reader("vocabulary", "vocab.txt", lambda at: Vocabulary.load(at / "vocab.txt", lower_case=None),
               _copy(WRITTEN / "shards" / "vocab.txt", "vocab.txt")),
        Reader("checksums", "list", lambda at: read_checksums(at / "list"),
               _write("list", "".join(f"part-{number}.hdf5 {number:032x}\n" for number in range(9)))),
        *(Reader(f"weights: {name}", f"exported/{name}", lambda at: read_weights(at / "exported"),
                 _copy(WRITTEN / "exported", "exported"))
          for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "vocab.txt")),
        *(Reader(f"TF1: {name}", f"tf1/{name}", lambda at: read_weights(at / "tf1"),
                 _copy(GOLDEN / "tf1-google", "tf1"))
          for name in ("bert_model.ckpt.index", "bert_model.ckpt.data-00000-of-00001", "bert_config.json")),
        *(Reader(f"table: {name}", name, lambda at, name=name: _table(at, name), _copy(source, name))
          for name, source in {
              "table.tsv": HERE / "data" / "glue" / "MRPC" / "dev.tsv",
              "table.jsonl": datasets / "json" / "cola" / "validation.jsonl",
              "table.parquet": datasets / "parquet" / "cola" / "validation-00000-of-00001.parquet",
              "table.arrow": datasets / "saved" / "cola" / "validation" / "data-00000-of-00001.arrow",
          }.items()),
        Reader("SQuAD", "dev.json", lambda at: read_squad(at / "dev.json", "v2.0"),
               _copy(HERE / "data" / "squad" / "dev-v2.0.json", "dev.json")),
        Reader("predictions", "predictions.json", _score, _squad_answers),
        Reader("MLPerf log", "result_0.txt", lambda at: show_logs([at / "result_0.txt"]),
               _copy(GOLDEN / "mlperf-h200-result_3.txt", "result_0.txt")),
        Reader("MLPerf check", "result_0.txt", lambda at: check_results(at),
               _copy(GOLDEN / "mlperf-h200-result_3.txt", "result_0.txt")),
        *(Reader(f"profile: {name}", f"{set_}/{name}", lambda at: profile_report([at / "set"], out=at / "page.html"),
                 _copy(HERE / "data" / "profile-h200", "set"))
          for name in ("device.json", "iterations.csv", "telemetry.csv", "telemetry.json", "roofline.csv",
                       "kernels.csv")),
        *(Reader(f"text: {name}", name, lambda at, name=name: estimate([at / name]), _text(name, pack))
          for name, pack in {"a.txt": bytes, "a.txt.gz": gzip.compress, "a.txt.bz2": bz2.compress,
                             "a.txt.xz": lzma.compress}.items()),
        *(Reader(f"BPE: {name}", f"{folder}/{name}", lambda at, folder=folder: _read_words(at / folder), _bpe)
          for name, folder in {"tokenizer.json": "bpe", "vocab.json": "split", "merges.txt": "split"}.items()),
        Reader("index of weights", "exported/model.safetensors.index.json", lambda at: read_weights(at / "exported"),
               _several_files),
        *(Reader(f"sentences: {name}", f"model/{name}", lambda at: read_pipeline(at / "model"), _sentences)
          for name in ("modules.json", "1_Pooling/config.json", "sentence_bert_config.json",
                       "config_sentence_transformers.json")),
        Reader("vectors", ".v.npy.partial/job.json", lambda at: VectorFile(at / "v.npy", 5, 3, False).check(VECTORS),
               _vectors),
        _task("tag", "{}.conll", miniature_tasks.names),
        _task("classify", "{}.jsonl", miniature_tasks.label_sets, task__target="classes"),
        Reader("text: wiki", "a.xml", lambda at: estimate([at / "a.xml"]), _copy(GOLDEN / "enwik-sample.xml", "a.xml")),
    ]  # fmt: skip


# --- the fuzz ----------------------------------------------------------------------------------------------------


class Fuzzed:
    """A reader with its copy, mutated again and again."""

    def __init__(self, reader: Reader, folder: Path) -> None:
        self.reader, self.folder = reader, folder
        folder.mkdir(parents=True)
        assert callable(reader.source)
        reader.source(folder)
        self.path = folder / reader.target
        self.whole = self.path.read_bytes()
        self.num_read = self.num_refused = 0
        self.slowest = 0.0
        reader.read(folder)  # the whole file is read, or the rest proves nothing

    def try_one(self, draw: random.Random) -> Finding | None:
        content = mutate(self.whole, draw)
        self.path.write_bytes(content)
        began, failure = time.process_time(), ""
        try:
            self.reader.read(self.folder)
            self.num_read += 1
        except UserError:
            self.num_refused += 1
        except Exception:
            failure = traceback.format_exc(limit=-4)
        seconds = time.process_time() - began
        self.slowest = max(self.slowest, seconds)
        self.path.write_bytes(self.whole)
        if not failure and seconds > SLOW_S:
            failure = f"took {seconds:.1f} s"
        return Finding(self.reader.name, failure, content) if failure else None


@dataclass
class Count:
    """What became of the mutations of one reader."""

    read: int = 0
    refused: int = 0
    slowest_s: float = 0.0
    faults: int = 0
    left_out: str = ""

    def __add__(self, other: Count) -> Count:
        return Count(
            self.read + other.read, self.refused + other.refused, max(self.slowest_s, other.slowest_s),
            self.faults + other.faults, self.left_out,
        )  # fmt: skip

    @property
    def mutations(self) -> int:
        return self.read + self.refused + self.faults


def fuzz(reader: Reader, folder: Path, seconds: float, seed: int) -> Count:
    """Mutate and read for `seconds`; each new fault is printed, with the file that shows it again."""
    try:
        fuzzed = Fuzzed(reader, folder)
    except ModuleNotFoundError as missing:
        return Count(left_out=f"{missing.name} is not installed")
    except UserError as error:
        if error.code != "missing-package":
            raise
        return Count(left_out=str(error))
    draw, end, seen, faults = random.Random(f"{seed} {reader.name}"), time.monotonic() + seconds, set[str](), 0
    while time.monotonic() < end:
        finding = fuzzed.try_one(draw)
        if finding is None:
            continue
        faults += 1
        if (key := re.sub(r"\d+", "", finding.what[-300:])) not in seen:
            seen.add(key)
            kept = Path(tempfile.gettempdir()) / f"fuzz-{seed}-{folder.name}-{len(seen)}"
            kept.write_bytes(finding.content)
            print(f"{reader.name}: {finding.what}\n(mutated file kept as {kept})", flush=True)
    return Count(fuzzed.num_read, fuzzed.num_refused, round(fuzzed.slowest, 3), faults)


def fuzz_all(names: list[str], seconds: float, seed: int) -> dict[str, Count]:
    """The count of each reader whose name contains one of `names`; all share the time."""
    chosen = [one for one in readers() if not names or any(name in one.name for name in names)]
    with tempfile.TemporaryDirectory() as folder:
        return {
            reader.name: fuzz(reader, Path(folder) / str(number), seconds / len(chosen), seed)
            for number, reader in enumerate(chosen)
        }


def write(path: Path, seed: int, processes: int, counts: dict[str, Count]) -> None:
    """Add a record to the list in `path`: no fault is written over."""
    machine = {"system": platform.platform(), "cores": os.cpu_count(), "python": platform.python_version()}
    mutations, faults = (sum(getattr(one, name) for one in counts.values()) for name in ("mutations", "faults"))
    record = {"seed": seed, "processes": processes, "machine": machine, "mutations": mutations, "faults": faults}
    record["readers"] = {name: asdict(count) for name, count in counts.items()}
    records = json.loads(path.read_text()) if path.exists() else []
    path.write_text(json.dumps([*records, record], indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--output", type=Path)
    parser.add_argument("readers", nargs="*")
    given = parser.parse_args()
    with ProcessPoolExecutor(given.processes) as pool:
        seeds = range(given.seed, given.seed + given.processes)
        parts = list(pool.map(partial(fuzz_all, given.readers, given.seconds), seeds))
    counts = {name: sum((part[name] for part in parts[1:]), parts[0][name]) for name in parts[0]}
    for name, count in counts.items():
        done = f"{count.read} read, {count.refused} refused, {count.faults} faults, slowest {count.slowest_s:.2f} s"
        print(f"{name}: {f'left out: {count.left_out}' if count.left_out else done}")
    faults = sum(count.faults for count in counts.values())
    print(f"seed {given.seed}: {sum(count.mutations for count in counts.values())} mutations, {faults} faults")
    if given.output:
        write(given.output, given.seed, given.processes, counts)
    raise SystemExit(faults > 0)


if __name__ == "__main__":
    main()
