"""Data preparation in units: the same bytes whoever makes them, and whatever is killed, full or wrong on the way."""

from __future__ import annotations

import fcntl
import gzip
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from bertrain.base.errors import UserError
from bertrain.data.formats.convert import convert
from bertrain.data.formats.shards import Shards
from bertrain.data.formats.source import open_data
from bertrain.data.prepare import engines
from bertrain.data.prepare import prepare as preparation
from bertrain.data.prepare.prepare import prepare
from bertrain.data.text.documents import LONGEST_LINE
from bertrain.data.text.extract import extract
from tests import helpers

UNIT_MB = 1000 / (1 << 20)
SCRIPT = """
import json, os, pathlib, signal, sys
from bertrain.data.prepare.prepare import prepare
arguments = json.loads(sys.argv[1])
fatal = arguments.pop("die_at_rename", None)
renames, rename = 0, pathlib.Path.rename
def counted(self, target):
    global renames
    renames += 1
    if renames == fatal:
        os.kill(os.getpid(), signal.SIGKILL)
    return rename(self, target)
pathlib.Path.rename = counted
if __name__ == "__main__":
    prepare(**arguments)
"""


@pytest.fixture
def arguments(tmp_path: Path) -> dict[str, object]:
    """What makes a small folder of a dozen units."""
    for number in range(3):
        helpers.write_corpus(tmp_path / f"text-{number}.txt", documents=20, seed=number)
    vocab = helpers.write_vocabulary(tmp_path / "vocab.txt")
    return {
        "inputs": [str(tmp_path / f"text-{number}.txt") for number in range(3)],
        "out": str(tmp_path / "data"),
        "vocab": str(vocab),
        "max_seq_length": 64,
        "dupe_factor": 3,
        "unit_mb": UNIT_MB,
        "rows_per_shard": 20,
    }


def start(arguments: dict[str, object], **more: object) -> subprocess.Popen[bytes]:
    script = Path(str(arguments["out"])).parent / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), json.dumps(arguments | more)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, env=helpers.environment())


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def undisturbed(arguments: dict[str, object], tmp_path: Path) -> dict[str, bytes]:
    prepare(**arguments | {"out": tmp_path / "undisturbed"})  # type: ignore[arg-type]
    return content(tmp_path / "undisturbed")


def hidden(tmp_path: Path) -> list[str]:
    return [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]


def units(tmp_path: Path) -> list[Path]:
    return list(tmp_path.glob(".data.work-*/unit-*"))


def wait_for(condition: Callable[[], object]) -> None:
    for _ in range(600):
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError("it did not happen")


@pytest.mark.parametrize("mode", [{"full_sentences": True}, {"reference": True, "per_file": True}])
def test_the_same_bytes_from_any_number_of_workers(
    arguments: dict[str, object], tmp_path: Path, mode: dict[str, object]
) -> None:
    expected = undisturbed(arguments | mode, tmp_path)
    prepare(**arguments | mode | {"workers": 2})  # type: ignore[arg-type]
    assert content(tmp_path / "data") == expected
    manifest = json.loads(expected["manifest.json"])
    assert sum(manifest["preparation"].get("rows_per_input", [manifest["rows"]])) == manifest["rows"]
    assert not hidden(tmp_path)


@pytest.mark.parametrize("fatal", [2, 7, 30, -1])
def test_killed_at_a_rename_and_begun_again(arguments: dict[str, object], tmp_path: Path, fatal: int) -> None:
    """The plan, a unit, a shard on its way into the whole, or the whole itself: each was about to get its name."""
    expected = undisturbed(arguments, tmp_path)
    process = start(arguments, die_at_rename=fatal if fatal > 0 else _renames(arguments, tmp_path))
    assert process.wait() == -signal.SIGKILL
    assert not (tmp_path / "data").exists()
    finished = len(units(tmp_path))
    seen: list[int] = []
    prepare(**arguments, workers=2, progress=lambda done, total: seen.append(done))  # type: ignore[arg-type]
    assert seen[0] == finished, "what was finished is not done again"
    assert finished or fatal == 2
    assert content(tmp_path / "data") == expected
    assert not hidden(tmp_path)


@pytest.mark.parametrize("assembled", [False, True])
@pytest.mark.parametrize("damage", ["shard cut", "shard lost", "summary cut", "summary of another kind"])
def test_a_damaged_unit_is_made_again(
    arguments: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str, assembled: bool
) -> None:
    """As after a loss of power, before the whole is put together or after its shards have moved."""
    expected = undisturbed(arguments, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(preparation, "finish_folder", lambda *_, **__: _raise(0, 0))
        with helpers.refused("test-error"):
            prepare(**arguments, progress=None if assembled else _raise_later)  # type: ignore[arg-type]
    finished = len(units(tmp_path))
    (work,) = tmp_path.glob(".data.work-*")
    summary = sorted(work.glob("unit-*/unit.json"))[1]
    shard = sorted(work.glob("[uw]*/*.arrow"))[1]
    if damage == "shard lost":
        shard.unlink()
    elif damage == "summary of another kind":
        summary.write_text("[]")
    else:
        os.truncate(shard if damage == "shard cut" else summary, 100)
    seen: list[int] = []
    prepare(**arguments, progress=lambda done, total: seen.append(done))  # type: ignore[arg-type]
    assert seen[0] < finished
    assert content(tmp_path / "data") == expected


def test_work_of_other_arguments_is_removed_unless_somebody_is_at_it(
    arguments: dict[str, object], tmp_path: Path
) -> None:
    for seed in (1, 2):
        with helpers.refused("test-error", ".data.work-"):
            prepare(**arguments | {"seed": seed, "progress": _raise_later})  # type: ignore[arg-type]
    held, idle = tmp_path.glob(".data.work-*")
    with open(held / "lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        prepare(**arguments)  # type: ignore[arg-type]
    assert held.is_dir()
    assert not idle.exists()


def _renames(arguments: dict[str, object], tmp_path: Path) -> int:
    """Renames in an undisturbed preparation: the last one names the result."""
    counted = SCRIPT.replace("prepare(**arguments)", "prepare(**arguments); print(renames)")
    command = [sys.executable, "-c", counted, json.dumps(arguments | {"out": str(tmp_path / "counted")})]
    return int(subprocess.run(command, capture_output=True, check=True, env=helpers.environment()).stdout)


def test_killed_again_and_again(arguments: dict[str, object], tmp_path: Path) -> None:
    """Two workers; the parent is killed at random moments. Nobody stays behind, and the result is the same."""
    arguments["dupe_factor"] = 60
    expected = undisturbed(arguments, tmp_path)
    draw = random.Random(1)
    for _ in range(3):
        process = start(arguments, workers=2)
        try:
            wait_for(lambda: list(tmp_path.glob(".data.work-*/*unit-*")) or (tmp_path / "data").exists())
            time.sleep(draw.uniform(0, 0.4))
            children = _children(process.pid)
        finally:
            process.kill()
            process.communicate()
        wait_for(lambda: not any(Path(f"/proc/{child}/cmdline").exists() for child in children))  # noqa: B023
        if (tmp_path / "data").exists():
            break
    if not (tmp_path / "data").exists():
        prepare(**arguments)  # type: ignore[arg-type]
    assert content(tmp_path / "data") == expected


def _children(parent: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


def test_a_killed_worker_is_one_sentence(arguments: dict[str, object], tmp_path: Path) -> None:
    arguments["dupe_factor"] = 100
    process = start(arguments, workers=2)
    wait_for(lambda: list(tmp_path.glob(".data.work-*/*unit-*")))
    workers = [child for child in _children(process.pid) if b"resource_tracker" not in _command_line(child)]
    os.kill(workers[0], signal.SIGKILL)
    error = process.communicate()[1].decode()
    assert process.returncode == 1, "the script does not catch UserError"
    assert "UserError: a worker process was killed" in error
    prepare(**arguments)  # type: ignore[arg-type]
    assert content(tmp_path / "data") == undisturbed(arguments, tmp_path)


def _command_line(process: int) -> bytes:
    return Path(f"/proc/{process}/cmdline").read_bytes()


def test_the_same_bytes_from_a_dask_cluster_that_loses_a_worker(arguments: dict[str, object], tmp_path: Path) -> None:
    distributed = pytest.importorskip("distributed")
    arguments["dupe_factor"] = 60
    expected = undisturbed(arguments, tmp_path)
    killed = []

    def kill_one(done: int, total: int) -> None:
        if done == 2:
            process = next(iter(cluster.workers.values())).pid
            os.kill(process, signal.SIGKILL)
            killed.append(process)

    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster:
        prepare(**arguments, engine="dask", scheduler=cluster.scheduler_address, progress=kill_one)  # type: ignore[arg-type]
    assert killed
    assert content(tmp_path / "data") == expected
    with helpers.refused("missing-option", "--scheduler"):
        prepare(**arguments | {"out": tmp_path / "other"}, engine="dask")  # type: ignore[arg-type]


def test_full_disk(arguments: dict[str, object], tmp_path: Path) -> None:
    """A limit on the size of files stands for a disk that is full; the same command goes on when there is room."""
    expected = undisturbed(arguments, tmp_path)
    options = ["--out", tmp_path / "cli", "--vocab", arguments["vocab"]]
    command = helpers.command("data", "prepare", *_inputs(arguments), *options)
    limit = (4000, resource.RLIM_INFINITY)
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=helpers.environment(),
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit),
    )
    assert done.returncode == 2
    assert "[unwritable-file]" in done.stderr
    assert "File too large" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "cli").exists()
    assert not hidden(tmp_path), "nothing was finished, so nothing is kept"
    prepare(**arguments)  # type: ignore[arg-type]
    assert content(tmp_path / "data") == expected


def _inputs(arguments: dict[str, object]) -> list[str]:
    inputs = arguments["inputs"]
    assert isinstance(inputs, list)
    return inputs


def test_every_unit_of_a_single_document(tmp_path: Path) -> None:
    """Documents of one word each, a unit each: a random B comes from another unit, and never has the word of A."""
    words = helpers.vocabulary_words()
    (tmp_path / "text.txt").write_text("\n\n".join("\n".join([f"{word} {word}"] * 12) for word in words))
    vocab = helpers.write_vocabulary(tmp_path / "vocab.txt")
    manifest = prepare(
        [tmp_path / "text.txt"], tmp_path / "data", vocab=vocab, max_seq_length=16, unit_mb=60 / (1 << 20)
    )
    assert len(manifest["files"]) == len(words), "as many units"
    shards = Shards.open(tmp_path / "data")
    for row in range(len(shards)):
        tokens = shards.read(np.array([row])).tokens.tolist()
        split = int(shards.read(np.array([row])).segment_b[0])
        a, b = set(tokens[1 : split - 1]), set(tokens[split:-1])
        assert len(a) == len(b) == 1
        assert (a != b) == bool(shards.is_random(np.array([row]))[0])


def test_giant_lines(arguments: dict[str, object], tmp_path: Path) -> None:
    giant = tmp_path / "giant.txt"
    good = Path(_inputs(arguments)[0]).read_bytes()
    giant.write_bytes(b"bato kese\n" + b"bato " * (LONGEST_LINE // 5 + 1) + b"\n" + good)
    arguments |= {"inputs": [str(giant)], "unit_mb": 16}
    with helpers.refused("line-too-long", f"line 2 of {giant}", "--on-error skip"):
        prepare(**arguments)  # type: ignore[arg-type]
    manifest = prepare(**arguments, on_error="skip")  # type: ignore[arg-type]
    assert manifest["preparation"]["text"]["lines_skipped"] == 1
    assert manifest["preparation"]["text"]["documents"] == 20


def test_going_on_with_skipping_after_an_error(arguments: dict[str, object], tmp_path: Path) -> None:
    with open(_inputs(arguments)[2], "ab") as file:
        file.write(b"x" * (LONGEST_LINE + 1))
    with helpers.refused("line-too-long", tmp_path / ".data.work-"):
        prepare(**arguments)  # type: ignore[arg-type]
    finished = len(units(tmp_path))
    assert finished
    seen: list[int] = []
    prepare(**arguments, on_error="skip", progress=lambda done, total: seen.append(done))  # type: ignore[arg-type]
    assert seen[0] == finished


def test_what_is_no_text(arguments: dict[str, object], tmp_path: Path) -> None:
    packed = tmp_path / "text.gz"
    packed.write_bytes(gzip.compress(b"bato kese\n\nlida"))
    arguments["inputs"] = [*_inputs(arguments), str(packed)]
    with helpers.refused("not-text", packed, "`bertrain data extract`"):
        prepare(**arguments)  # type: ignore[arg-type]
    manifest = prepare(**arguments, on_error="skip")  # type: ignore[arg-type]
    assert manifest["preparation"]["skipped_inputs"] == ["text.gz"]
    assert len(manifest["preparation"]["inputs"]) == 3


@pytest.mark.parametrize(
    ("head", "named"),
    [
        (b'<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/">', "dump"),
        (b'<doc id="1" title="a">\na\n', "wikiextractor"),
        (b'{"text": "One."}\n', "jsonl"),
        (b'[{"text": "One."}]\n', "json"),
        (b"PAR1\x15\x04", "parquet"),
        (b"ARROW1\0\0", "arrow"),
    ],
)
def test_other_forms_are_not_taken_for_text(
    arguments: dict[str, object], tmp_path: Path, head: bytes, named: str
) -> None:
    (tmp_path / "articles").write_bytes(head)
    with helpers.refused("not-text", tmp_path / "articles", named):
        prepare(**arguments | {"inputs": [tmp_path / "articles"]})  # type: ignore[arg-type]


def test_what_was_held_out_is_not_taken_for_training(arguments: dict[str, object], tmp_path: Path) -> None:
    extract(_inputs(arguments), tmp_path / "text", hold_out=5)  # type: ignore[arg-type]
    with helpers.refused("held-out-input", f"give {tmp_path / 'text' / 'train'}"):
        prepare(**arguments | {"inputs": [tmp_path / "text"]})  # type: ignore[arg-type]
    manifest = prepare(**arguments | {"inputs": [tmp_path / "text" / "train"]})  # type: ignore[arg-type]
    assert manifest["preparation"]["text"]["documents"] == 55


def test_a_folder_with_held_out_text_and_checksums(
    arguments: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As MLPerf's results4: eval.txt is refused, lists of checksums are left out, and both are named."""
    folder = tmp_path / "results4"
    folder.mkdir()
    for name in ("part-00000-of-00001", "eval.txt"):
        helpers.write_corpus(folder / name, documents=8)
    for name in ("eval.md5", "bert_reference_results_text_md5.txt", "SHA256SUMS"):
        (folder / name).write_text("d41d8cd98f00b204e9800998ecf8427e  part-00000-of-00001\n")
    with helpers.refused("held-out-input", folder / "eval.txt"):
        prepare(**arguments | {"inputs": folder})  # type: ignore[arg-type]
    with helpers.refused("not-text", "checksums"):
        prepare(**arguments | {"inputs": sorted(folder.iterdir())})  # type: ignore[arg-type]  # as the shell's *
    (folder / "eval.txt").rename(folder / "EVAL.txt")
    with helpers.refused("held-out-input", folder / "EVAL.txt"):
        prepare(**arguments | {"inputs": [folder / "EVAL.txt", folder / "part-00000-of-00001"]})  # type: ignore[arg-type]
    (folder / "EVAL.txt").unlink()
    manifest = prepare(**arguments | {"inputs": folder})  # type: ignore[arg-type]
    assert manifest["preparation"]["text"]["documents"] == 8
    assert "3 checksum files" in capsys.readouterr().err


def test_a_file_named_eval_among_ordinary_files_is_text(arguments: dict[str, object], tmp_path: Path) -> None:
    """As in vim's documentation, where eval.txt is about expressions."""
    folder = tmp_path / "doc"
    folder.mkdir()
    for name in ("change.txt", "eval.txt"):
        helpers.write_corpus(folder / name, documents=8)
    manifest = prepare(**arguments | {"inputs": folder})  # type: ignore[arg-type]
    assert manifest["preparation"]["text"]["documents"] == 16


def test_the_vocabulary_of_another_text(arguments: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join([*helpers.SPECIAL, "bato"]) + "\n")
    with helpers.refused("other-vocabulary", "9", tmp_path / "vocab.txt"):
        prepare(**arguments)  # type: ignore[arg-type]
    assert not hidden(tmp_path)


def test_rules_of_masks_drawn_later_are_noted(arguments: dict[str, object], tmp_path: Path) -> None:
    assert not prepare(**arguments)["preparation"].keys() & {"max_predictions", "masked_lm_prob"}  # type: ignore[arg-type]
    arguments |= {"out": tmp_path / "ruled", "max_predictions": 3, "masked_lm_prob": 0.5}
    prepare(**arguments)  # type: ignore[arg-type]
    written = convert(tmp_path / "ruled", tmp_path / "converted", to="tfrecord")
    assert (written.masks, written.max_predictions) == ("drawn", 3)
    masked = open_data(tmp_path / "converted", vocab=str(arguments["vocab"]))
    assert masked.predictions is not None
    assert np.array_equal(masked.predictions, np.minimum(3, np.round(0.5 * masked.lengths)))


def test_two_at_once(arguments: dict[str, object], tmp_path: Path) -> None:
    with helpers.refused("test-error"):
        prepare(**arguments, progress=_raise)  # type: ignore[arg-type]
    assert not hidden(tmp_path)
    held = []

    def try_again(done: int, total: int) -> None:
        if not held:
            (work,) = tmp_path.glob(".data.work-*")
            held.append(work)
            with open(work / "lock") as lock, pytest.raises(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with helpers.refused("already-running", tmp_path / "data"):
                prepare(**arguments)  # type: ignore[arg-type]

    prepare(**arguments, progress=try_again)  # type: ignore[arg-type]
    assert held


def _raise(done: int, total: int) -> None:
    raise UserError("test-error", "an error")


def _raise_later(done: int, total: int) -> None:
    if done == 5:
        raise UserError("test-error", "an error")


@pytest.mark.parametrize(
    ("wrong", "code", "named"),
    [
        ({"workers": 0}, "option-out-of-range", "--workers is 0"),
        ({"dupe_factor": 0}, "option-out-of-range", "--dupe-factor is 0"),
        ({"max_predictions": 0}, "option-out-of-range", "--max-predictions is 0"),
        ({"masked_lm_prob": 1.5}, "option-out-of-range", "--masked-lm-prob is 1.5"),
        ({"unit_mb": 0}, "option-out-of-range", "--unit-mb is 0"),
        ({"unit_mb": float("inf")}, "option-out-of-range", "--unit-mb is inf"),
        ({"full_sentences": True, "short_seq_prob": 0.1}, "option-without-effect", "--short-seq-prob"),
        ({"scheduler": "tcp://node1:8786"}, "option-without-effect", "--scheduler"),
        ({"rows_per_shard": 1 << 26}, "option-out-of-range", "--rows-per-shard is 67108864"),
        ({"per_file": True}, "option-without-effect", "--per-file"),
        ({"reference": True, "full_sentences": True}, "conflicting-options", "--full-sentences"),
        ({"engine": "dask", "scheduler": "tcp://127.0.0.1:9"}, "no-scheduler", "tcp://127.0.0.1:9"),
    ],
)
def test_wrong_choices(
    arguments: dict[str, object],
    wrong: dict[str, object],
    code: str,
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engines, "DASK_TIMEOUT_S", 0.5)
    with helpers.refused(code, named):
        prepare(**arguments | wrong)  # type: ignore[arg-type]
    assert not hidden(tmp_path)
