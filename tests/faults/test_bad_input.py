"""What a user can get wrong: one sentence, exit code 2, and nothing half-written."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from bertrain.cli.main import main
from bertrain.data.formats.shards import SCHEMA_VERSION
from bertrain.training.start import pretrain
from tests import helpers


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return helpers.make_data(tmp_path_factory.mktemp("good"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    pretrain(helpers.tiny_settings(train__max_steps=2), data, folder)
    return folder


class Refused:
    """Runs the command line in this process and expects it to be refused."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def __call__(self, *arguments: object, code: int = 2) -> str:
        self._monkeypatch.setattr(sys, "argv", ["bertrain", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
        assert caught.value.code == code
        sentence = self._capsys.readouterr().err.strip()
        assert sentence.startswith("bertrain: ")
        assert "\n" not in sentence
        return sentence.removeprefix("bertrain: ")


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refused:
    return Refused(monkeypatch, capsys)


def start(data: Path, run: Path, **overrides: object) -> list[object]:
    return ["pretrain", "bert-tiny", "--data", data, "--run", run, *helpers.tiny_arguments(**overrides)]


@pytest.mark.parametrize(
    ("command", "option", "one"),
    [
        ("prepare", "--on-error", "skip"),
        ("prepare", "--engine", "dask"),
        ("extract", "--format", "jsonl"),
        ("extract", "--sentences", "lines"),
        ("extract", "--document-end", "file"),
        ("extract", "--on-error", "skip"),
        ("convert", "--to", "tfrecord"),
        ("convert", "--packing", "spfhp"),
        ("pack", "--algorithm", "nnlshp"),
    ],
)
def test_no_such_choice(refused: Refused, data: Path, tmp_path: Path, command: str, option: str, one: str) -> None:
    said = refused("data", command, data, "--out", tmp_path / "out", option, "other")
    assert option in said
    assert f"invalid value for '{option}': 'other' is not one of" in said
    assert f"'{one}'" in said
    assert not (tmp_path / "out").exists()


def test_nothing_of_that_name_to_download(refused: Refused, tmp_path: Path) -> None:
    assert "'books' is not one of 'wikipedia', 'mlperf'" in refused("data", "download", "books", "--out", tmp_path)


def test_no_such_recipe(refused: Refused, data: Path, tmp_path: Path) -> None:
    said = refused("pretrain", "bert-tinny", "--data", data, "--run", tmp_path / "r")
    assert "'bert-tiny'" in said
    assert "[unknown-recipe]" in said
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model.hidden", "8"], "[unknown-setting]"),
        (["--steps", "8"], "[unknown-option]"),
        (["--evaluate.at_once", "8"], "[renamed-setting]"),
        (["--train.max_steps", "many"], "[invalid-value]"),
        (["--train.max_steps=-1"], "[out-of-range]"),
        (["--train.max_steps"], "[missing-value]"),
        (["extra"], "[unknown-option]"),
        (["--batch.tokens", "4096"], "[step-size]"),
        (["--quiet", "--verbose"], "[conflicting-options]"),
        (["--budget", "20m", "--max-steps", "5"], "[conflicting-options]"),
        (["--benchmark"], "[conflicting-options]"),
        (["--benchmark-steps", "5"], "[option-without-effect]"),
        (["--warm-up-steps", "0"], "[option-without-effect]"),
        (["--benchmark", "--dry-run", "--json"], "[conflicting-options]"),
        (["--train.device", "cuda"], "train.device"),
        (["--train.device", "cpu", "--train.precision", "fp8"], "train.precision fp8"),
    ],
)
def test_wrong_settings(refused: Refused, data: Path, tmp_path: Path, arguments: list[str], said: str) -> None:
    if "cuda" in arguments:
        import torch

        if torch.cuda.is_available():
            pytest.skip("there is a GPU here, so asking for one is right")
    assert said in refused(*start(data, tmp_path / "r"), *arguments)
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("command", [["finetune", "classify", "--run"], ["sweep", "bert-tiny", "--seeds", 2, "--out"]])
def test_a_wrong_instruction_set(refused: Refused, data: Path, tmp_path: Path, command: list[object]) -> None:
    said = refused(*command, tmp_path / "r", "--data", data, "--isa", "foo")
    assert "train.isa must be one of auto, avx2, avx512, amx" in said
    assert not (tmp_path / "r").exists()


def test_usage_errors_are_one_sentence_too(refused: Refused, data: Path) -> None:
    assert "see `bertrain pretrain --help`" in refused("pretrain", "bert-tiny")
    assert "? See `bertrain --help` [usage]" in refused("pretain")
    assert "not one of" in refused("evaluate", data, "--data", data, "--device", "gpu")


def test_weights_to_begin_with_are_checked_before_anything_is_written(
    refused: Refused, data: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start_here = start(data, tmp_path / "r")
    assert "[missing-weights]" in refused(*start_here, "--init", tmp_path / "none")
    assert "[other-model]" in refused(*start(data, tmp_path / "r", model__hidden_size=16), "--init", run)
    other = helpers.make_data(tmp_path / "other", cased=True)
    assert "leave --cased out" in capsys.readouterr().err
    assert "a different vocabulary from the model's" in refused(*start(other, tmp_path / "r"), "--init", run)
    assert "a different vocabulary from the model's" in refused(*start_here, "--evaluate.data", other)
    assert not (tmp_path / "r").exists()


def test_resume_changes_only_what_does_not_shape_the_training(refused: Refused, run: Path) -> None:
    said = refused("resume", run, "--train.seed", 3)
    assert "train.seed" in said
    assert "[fixed-setting]" in said


def test_run_folder_missing_from_the_command(refused: Refused, data: Path) -> None:
    said = refused("pretrain", "bert-tiny", "--data", data)
    assert "--run" in said
    assert "[missing-option]" in said


def test_missing_and_empty_data(refused: Refused, tmp_path: Path) -> None:
    assert f"{tmp_path / 'none'}; " in refused(*start(tmp_path / "none", tmp_path / "r"))
    (tmp_path / "empty").mkdir()
    assert "[not-prepared]" in refused(*start(tmp_path / "empty", tmp_path / "r"))
    assert not (tmp_path / "r").exists()


def test_damaged_shards_are_named(refused: Refused, tmp_path: Path) -> None:
    data = helpers.make_data(tmp_path)
    shard = data / "shard-00000.arrow"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    assert f"{shard}" in refused(*start(data, tmp_path / "r"))
    os.truncate(shard, 100)
    assert f"the shard {shard} has 100 bytes" in refused(*start(data, tmp_path / "r"))
    shard.unlink()
    assert f"{shard}" in refused(*start(data, tmp_path / "r"))
    for text in ("{}", f'{{"schema_version": {SCHEMA_VERSION}}}', "[]", "{"):
        (data / "manifest.json").write_text(text)
        assert f"{data / 'manifest.json'} is damaged" in refused(*start(data, tmp_path / "r"))
    assert not (tmp_path / "r").exists()


def test_data_of_another_vocabulary(refused: Refused, data: Path, run: Path, tmp_path: Path) -> None:
    said = refused(*start(data, tmp_path / "r", model__vocab_size=99))
    assert "[vocabulary-size]" in said
    assert "leave --model.vocab_size out" in said
    other = tmp_path / "other"
    other.mkdir()
    words = helpers.write_vocabulary(other / "vocab.txt").read_text().split()
    words[-1], words[-2] = words[-2], words[-1]
    (other / "vocab.txt").write_text("\n".join(words) + "\n")
    corpus = helpers.write_corpus(other / "corpus.txt")
    helpers.bertrain(
        "data", "prepare", corpus, "--out", other / "data", "--vocab", other / "vocab.txt", "--max-seq-length", 64
    )
    assert "a different vocabulary from the model's" in refused("evaluate", run, "--data", other / "data")


def test_a_vocabulary_that_was_swapped(refused: Refused, tmp_path: Path) -> None:
    data = helpers.make_data(tmp_path)
    words = (data / "vocab.txt").read_text().split()
    words[4], words[9] = words[9], words[4]
    (data / "vocab.txt").write_text("\n".join(words) + "\n")
    assert "[damaged-data]" in refused(*start(data, tmp_path / "r"))


def test_data_longer_than_the_model_reads(refused: Refused, data: Path, tmp_path: Path) -> None:
    said = refused(*start(data, tmp_path / "r", data__max_seq_length=32))
    assert "[example-too-long]" in said
    assert "data.max_seq_length 32" in said


def test_a_run_folder_that_holds_another_run(refused: Refused, data: Path, run: Path, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    said = refused(*start(data, run, train__max_steps=2, train__seed=7))
    assert str(run) in said
    assert "train.seed (7 here, 1 there)" in said
    assert said.endswith("[other-run]")
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    assert "--init" in refused(*start(data, run, train__max_steps=2), "--init", tmp_path)
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("mine")
    assert "[occupied-folder]" in refused(*start(data, tmp_path / "thesis"))
    assert (tmp_path / "thesis" / "chapter.txt").read_text() == "mine"


def test_the_same_command_again_continues(data: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pretrain(helpers.tiny_settings(train__max_steps=2), data, run)
    assert "continuing after step 2" in capsys.readouterr().out
    assert len(helpers.losses(run)) == 2


def test_resume_and_evaluate_of_what_is_no_run(refused: Refused, data: Path, run: Path, tmp_path: Path) -> None:
    assert "[no-run]" in refused("resume", tmp_path)
    assert "[no-run]" in refused("evaluate", tmp_path, "--data", data)
    for number in range(1, 6):
        (tmp_path / "seeds" / f"seed-{number}").mkdir(parents=True)
        (tmp_path / "seeds" / f"seed-{number}" / "config.json").write_text('{"schema_version": 1}')
    said = refused("evaluate", tmp_path / "seeds", "--data", data)
    assert "seed-1, seed-2, seed-3, seed-4, …" in said
    for text in ("{", '{"schema_version": 1}'):
        (tmp_path / "config.json").write_text(text)
        assert "[damaged-run]" in refused("resume", tmp_path)
    assert "no data folder" in refused("evaluate", run, "--data", tmp_path / "none")


def test_resume_when_the_data_has_moved(refused: Refused, tmp_path: Path) -> None:
    data = helpers.make_data(tmp_path)
    settings = helpers.tiny_settings(train__max_steps=2, schedule__warmup_steps=0)
    pretrain(settings, data, tmp_path / "run")
    data.rename(tmp_path / "moved")
    moved = refused("resume", tmp_path / "run")
    assert str(data) in moved
    assert moved.endswith("[missing-data]")
    pretrain(settings, tmp_path / "moved", tmp_path / "run")
    assert json.loads((tmp_path / "run" / "config.json").read_text())["data"]["folder"] == str(tmp_path / "moved")


def test_an_interrupt_outside_training_is_said(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    from bertrain.config import recipe

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(recipe, "list_recipes", interrupted)
    assert "interrupted" in refused("recipes", code=130)


def test_resume_on_other_data(refused: Refused, tmp_path: Path) -> None:
    data = helpers.make_data(tmp_path)
    pretrain(helpers.tiny_settings(train__max_steps=2, schedule__warmup_steps=0), data, tmp_path / "run")
    manifest = json.loads((data / "manifest.json").read_text())
    manifest["preparation"]["seed"] = 1
    (data / "manifest.json").write_text(json.dumps(manifest))
    assert "[other-data]" in refused("resume", tmp_path / "run")


def test_prepare_refuses_what_it_cannot_use(refused: Refused, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert "[missing-input]" in refused("data", "prepare", tmp_path / "none.txt", "--out", out)
    (tmp_path / "hollow").mkdir()
    assert "[empty-input]" in refused("data", "prepare", tmp_path / "hollow", "--out", out)
    (tmp_path / "blank.txt").write_text("\n\n \n")
    assert "[no-example]" in refused("data", "prepare", tmp_path / "blank.txt", "--out", out)
    text = helpers.write_corpus(tmp_path / "text.txt")
    assert "not an empty folder" in refused("data", "prepare", text, "--out", data)
    assert "--max-seq-length is 2" in refused("data", "prepare", text, "--out", out, "--max-seq-length", 2)
    assert "--short-seq-prob is 2" in refused("data", "prepare", text, "--out", out, "--short-seq-prob", 2)
    assert "[missing-vocabulary]" in refused("data", "prepare", text, "--out", out, "--vocab", tmp_path / "v")
    (tmp_path / "v").write_text("hello\nworld\n")
    assert "lacks [PAD]" in refused("data", "prepare", text, "--out", out, "--vocab", tmp_path / "v")
    (tmp_path / "v").write_text("\n".join([*helpers.SPECIAL, "twice", "twice"]) + "\n")
    assert "'twice'" in refused("data", "prepare", text, "--out", out, "--vocab", tmp_path / "v")
    (tmp_path / "one.txt").write_text("a sentence .\nanother sentence .\n" * 50)
    assert "[single-document]" in refused("data", "prepare", tmp_path / "one.txt", "--out", out)
    (tmp_path / "one.txt").unlink()
    assert "[unwritable-file]" in refused("data", "prepare", text, "--out", "/proc/none/here")
    leftovers = {path.name for path in tmp_path.iterdir()} - {"hollow", "blank.txt", "text.txt", "v"}
    assert not leftovers, "nothing was left behind"


def test_errors_of_ranks_are_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through real processes: a damaged shard is found by the first rank after the ranks were started.

    It takes its time to end, and the other's broken connection is not taken for the cause.
    """
    pause = "import atexit, os, time\nos.environ.get('RANK') == '0' and atexit.register(time.sleep, 2)\n"
    (tmp_path / "sitecustomize.py").write_text(pause)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    bad = helpers.make_data(tmp_path)
    shard = bad / "shard-00000.arrow"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    done = helpers.bertrain(*start(bad, tmp_path / "r"), "--nproc", 2, check=False)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("bertrain: ")
    assert str(shard) in line
    assert line.endswith("[damaged-data]")


def test_a_path_is_printed_in_one_line_without_control_characters(refused: Refused, tmp_path: Path) -> None:
    sentence = refused("weights", "show", tmp_path / "a\nb\x1b[31m")
    assert r"a\nb\x1b[31m" in sentence
    sentence = refused("data", "convert", tmp_path, "--out", tmp_path / "out")  # typer lists choices in lines
    assert "arrow, hdf5-fixed" in sentence
