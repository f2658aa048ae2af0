"""Commands of the command line; those that the start of a process may change, in a process of their own."""

from __future__ import annotations

import json
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest

import bertrain
from bertrain.base import isa
from bertrain.base.doctor import doctor
from bertrain.config.recipe import GROUPS, recipe_names
from bertrain.data.feed.batching import POLICIES
from bertrain.data.feed.stats import data_stats
from bertrain.data.formats.shards import Shards
from bertrain.data.text.vocabulary import Vocabulary
from tests import helpers
from tests.miniature_tasks import command_line


def test_recipes_and_settings() -> None:
    listed = json.loads(command_line("recipes", "--json").out)
    assert sorted(listed) == recipe_names()
    few, everything = (command_line("recipes", *words).out for words in ([], ["--all"]))
    assert sum(f"  {name} " in few for name in listed) == 8
    assert "bert-tiny" in few
    assert all(f"  {name} " in everything for name in listed)
    assert all(f"{group}:\n" in everything for group in GROUPS)
    flat = command_line("recipes", "bert-large-phase2").out
    assert "# Builds on bert-base-phase2, bert-base-phase1.\n" in flat
    assert tomllib.loads(flat)["optimizer"]["name"] == "lamb"
    described = json.loads(command_line("settings", "--json").out)
    assert {"model.nsp", "batch.token_budget", "log.level"} <= {entry["name"] for entry in described}
    assert all(entry["help"] for entry in described)
    few, everything = (command_line("settings", *words).out for words in ([], ["--all"]))
    for entry in described:
        line = f"--{entry['name']} ("
        assert line in everything
        assert (line in few) == (not entry["experimental"])
    assert "[unknown-setting]" in command_line("settings", "optimiser", check=False).err
    assert "--optimizer.learning_rate" in command_line("settings", "learning", "rate").out


def test_shells_complete_verbs_and_recipes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_BERTRAIN_COMPLETE", "complete_bash")
    for typed, completed in (("pre", "pretrain"), ("pretrain bert-s", "bert-small")):
        monkeypatch.setenv("COMP_WORDS", f"bertrain {typed}")
        monkeypatch.setenv("COMP_CWORD", str(len(typed.split())))
        assert completed in helpers.bertrain().stdout.split()


def test_doctor_tells_of_this_machine(tmp_path: Path) -> None:
    findings = {finding.subject: finding for finding in doctor(tmp_path)}
    assert {"python", "packages", "cores", "cpu", "memory", "disk", "compilers", "triton"} <= findings.keys()
    assert findings["packages"].verdict == "ok"
    assert all(finding.verdict in ("ok", "note", "missing") for finding in findings.values())
    printed = json.loads(command_line("doctor", "--json").out)
    assert {entry["subject"] for entry in printed} == findings.keys()


def test_vocabulary_training(tmp_path: Path) -> None:
    text = Path(__file__).parents[1] / "golden" / "sample.txt"
    place = tmp_path / "vocab.txt"
    printed = json.loads(helpers.bertrain("data", "vocab", text, "--size", 100, "--out", place, "--json").stdout)
    vocabulary = Vocabulary.load(place)
    assert printed == {"file": str(place), "size": 100, "lower_case": True, "sha256": vocabulary.hash}
    assert len(vocabulary.words) == 100
    assert vocabulary.words[:5] == tuple(helpers.SPECIAL)
    assert vocabulary.continues_word.any()
    assert bertrain.train_vocabulary([text], tmp_path / "again.txt", size=100) == vocabulary, "another process"
    with helpers.refused("too-little-text", "--size"):
        bertrain.train_vocabulary([text], tmp_path / "big.txt", size=20_000)
    assert not (tmp_path / "big.txt").exists()


def test_stats_count_what_is_there(tmp_path: Path) -> None:
    folder = helpers.make_data(tmp_path)
    shards = Shards.open(folder)
    stats = json.loads(command_line("data", "stats", folder, "--ranks", 4, "--sequences", 32, "--json").out)
    assert stats["examples"] == len(shards)
    assert stats["tokens"] == int(shards.lengths.sum())
    assert sum(stats["histogram"].values()) == len(shards)
    edges = [0, *map(int, stats["histogram"])]
    for low, high in pairwise(edges):
        assert stats["histogram"][str(high)] == int(((shards.lengths > low) & (shards.lengths <= high)).sum())
    by_name = {entry["policy"]: entry for entry in stats["policies"]}
    assert by_name.keys() == set(POLICIES)
    assert 0 <= by_name["budget"]["padding"] < by_name["padded"]["padding"]
    assert by_name["budget"]["token_imbalance"] < by_name["padded"]["token_imbalance"]
    table = command_line("data", "stats", folder).out
    assert "attention" in table
    with helpers.refused("example-too-long", "--token-budget"):
        data_stats(folder, token_budget=10)


def test_a_setting_that_is_given_twice(tmp_path: Path) -> None:
    data = helpers.make_data(tmp_path)
    command = ("pretrain", "bert-tiny", "--data", data, "--dry-run",
               *helpers.tiny_arguments(train__max_steps=2, train__precision="fp32"))  # fmt: skip
    assert command_line(*command, "--max-steps", "2").code == 0, "the same value, so nothing is chosen"
    said = command_line(*command, "--max-steps", "3", check=False)
    assert said.code == 2
    assert "train.max_steps" in said.err
    assert "[conflicting-options]" in said.err
    assert command_line(*command, "--train.max_steps", "3").code == 0, "the last word counts"


def test_the_next_command_can_be_pasted(tmp_path: Path) -> None:
    text = Path(__file__).parents[1] / "golden" / "sample.txt"
    folder = tmp_path / "with a space"
    folder.mkdir()
    said = [
        command_line("data", "vocab", text, "--size", "300", "--cased", "--out", folder / "vocab.txt").out
        for _ in range(2)
    ]
    follows = f"next: bertrain data prepare INPUT --vocab '{folder / 'vocab.txt'}' --out DIR\n"
    assert said[0].endswith(f"300 words; {follows}")
    assert said[1].endswith(f"300 words, in place of what was there; {follows}")
    for cased, out in ((["--lower-case"], "folded"), ([], "as-it-is")):
        done = command_line("data", "prepare", text, "--vocab", folder / "vocab.txt", *cased, "--out", tmp_path / out)
        assert ("--cased" in done.err) == bool(cased)


def test_precision_as_intels_scripts_name_it(tmp_path: Path) -> None:
    data = helpers.make_data(tmp_path)
    command = ("pretrain", "bert-tiny", "--data", data, "--dry-run", *helpers.tiny_arguments(train__max_steps=2))
    said = helpers.bertrain(*command, "--precision", "avx-fp32", check=False)
    if "avx512bw" in isa.cpu_flags():
        assert said.returncode == 0
        assert "fp32" in said.stdout
    else:
        assert said.returncode == 2
        assert "[unsupported-isa]" in said.stderr
