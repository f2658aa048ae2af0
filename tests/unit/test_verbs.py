"""The verbs that look and tell: recipes, settings, doctor, vocab, stats; their JSON and their Python twins."""

from __future__ import annotations

import ast
import json
import tomllib
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import typer

import bertrain
from bertrain.base import isa
from bertrain.cli.main import app
from bertrain.cli.options import TRAINING_OPTIONS, join_overrides
from bertrain.config.recipe import GROUPS, recipe_names
from bertrain.config.resolve import describe
from bertrain.data.feed.batching import POLICIES
from bertrain.data.formats.shards import Shards
from bertrain.data.text.vocabulary import Vocabulary
from bertrain.reports.data_plots import plot_stats
from tests import helpers


def test_every_name_of_the_package_is_there_and_documented() -> None:
    for name in bertrain.__all__:
        assert getattr(bertrain, name).__doc__, name
    with pytest.raises(AttributeError, match="trian"):
        bertrain.__getattr__("trian")


def test_a_type_checker_sees_the_names_that_are_loaded_lazily() -> None:
    tree = ast.parse(Path(bertrain.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {
        alias.name: node.module.removeprefix("bertrain.")
        for node in block.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
        if alias.asname == alias.name
    }
    assert seen == bertrain._MODULES
    assert [node.name for node in block.orelse if isinstance(node, ast.FunctionDef)] == ["__getattr__"]
    assert Path(bertrain.__file__).with_name("py.typed").is_file()


def test_recipes_and_settings() -> None:
    listed = json.loads(helpers.bertrain("recipes", "--json").stdout)
    assert sorted(listed) == recipe_names()
    few, everything = (helpers.bertrain("recipes", *words).stdout for words in ([], ["--all"]))
    assert sum(f"  {name} " in few for name in listed) == 6
    assert "bert-tiny" in few
    assert all(f"  {name} " in everything for name in listed)
    assert all(f"{group}:\n" in everything for group in GROUPS)
    flat = helpers.bertrain("recipes", "bert-large-phase2").stdout
    assert "# Builds on bert-base-phase2, bert-base-phase1.\n" in flat
    assert tomllib.loads(flat)["optimizer"]["name"] == "lamb"
    described = json.loads(helpers.bertrain("settings", "--json").stdout)
    assert {"model.nsp", "batch.token_budget", "log.level"} <= {entry["name"] for entry in described}
    assert all(entry["help"] for entry in described)
    few, everything = (helpers.bertrain("settings", *words).stdout for words in ([], ["--all"]))
    for entry in described:
        line = f"--{entry['name']} ("
        assert line in everything
        assert (line in few) == (not entry["experimental"])
    assert "[unknown-section]" in helpers.bertrain("settings", "optimiser", check=False).stderr


def test_verbs_that_train_take_the_same_short_options() -> None:
    root: Any = typer.main.get_command(app)
    verbs = [root.commands["pretrain"], root.commands["finetune"], root.commands["mlperf"].commands["run"]]
    names = {entry["name"]: entry for entry in describe()}
    for option in TRAINING_OPTIONS:
        assert option.setting in names
        found = [next(one for one in verb.params if option.option in one.opts) for verb in verbs]
        assert {one.help for one in found} == {f"{option.setting}: {option.help}"}
    resumed = {name for one in root.commands["resume"].params for name in one.opts}
    for option in TRAINING_OPTIONS:
        assert (option.option in resumed) == (not names[option.setting]["shapes_training"])


def test_short_options_stand_for_settings() -> None:
    by_name = {option.option: option for option in TRAINING_OPTIONS}
    assert by_name["--max-steps"].settings("3") == [("train.max_steps", "3")]
    assert by_name["--quiet"].settings(True) == [("log.level", "quiet")]
    assert by_name["--quiet"].settings(False) == by_name["--max-steps"].settings(None) == []
    assert by_name["--precision"].settings("avx-fp32") == [("train.precision", "fp32"), ("train.isa", "avx512")]
    long = [("train.seed", "1"), ("train.seed", "2")]
    assert join_overrides(long, [("train.max_steps", "3")]) == [*long, ("train.max_steps", "3")]
    assert join_overrides([("train.seed", "2")], [("train.seed", "2")])
    for one, other in (
        ([("train.seed", "1")], [("train.seed", "2")]),
        ([], [("log.level", "quiet"), ("log.level", "verbose")]),
        ([], [("train.isa", "avx512"), ("train.isa", "amx")]),
        ([], [("train.budget", "20m"), ("train.max_steps", "5")]),
    ):
        with helpers.refused("conflicting-options"):
            join_overrides(one, other)


def test_doctor_tells_of_this_machine(tmp_path: Path) -> None:
    findings = {finding.subject: finding for finding in bertrain.doctor(tmp_path)}
    assert {"python", "packages", "cores", "cpu", "memory", "disk", "compilers", "triton"} <= findings.keys()
    assert findings["packages"].verdict == "ok"
    assert all(finding.verdict in ("ok", "note", "missing") for finding in findings.values())
    printed = json.loads(helpers.bertrain("doctor", "--json").stdout)
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
    stats = json.loads(helpers.bertrain("data", "stats", folder, "--ranks", 4, "--sequences", 32, "--json").stdout)
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
    table = helpers.bertrain("data", "stats", folder).stdout
    assert "attention" in table
    with helpers.refused("example-too-long", "--token-budget"):
        bertrain.data_stats(folder, token_budget=10)


def test_padded_fill_worked_out_by_hand(tmp_path: Path) -> None:
    """With one rank and room for a whole step, the padded policy computes whole rectangles of four sizes."""
    folder = helpers.make_data(tmp_path)
    shards = Shards.open(folder)
    longest = int(shards.lengths.max())
    stats = bertrain.data_stats(folder, ranks=1, sequences=16, token_budget=16 * longest)
    padded = next(entry for entry in stats.policies if entry.policy == "padded")
    from bertrain.data.feed.batching import rows_at

    real = sum(int(shards.lengths[rows_at(np.arange(16 * k, 16 * k + 16), len(shards), 1)[1]].sum()) for k in range(20))
    assert padded.padding == pytest.approx(1 - real / (20 * 16 * longest))
    assert padded.token_imbalance == 1


def test_stats_draw_what_they_print(tmp_path: Path) -> None:
    folder = helpers.make_data(tmp_path)
    plot = tmp_path / "stats.svg"
    stats = bertrain.data_stats(folder, ranks=4, sequences=32)
    plot_stats(stats, plot)
    root = ElementTree.parse(plot).getroot()
    labels = [element.attrib["aria-label"] for element in root.iter() if "aria-label" in element.attrib]
    assert len(labels) == 2
    for entry in stats.policies:
        shown = (entry.padding, entry.token_imbalance - 1, entry.attention_imbalance - 1)
        assert f"{entry.policy} {', '.join(f'{value:.1%}' for value in shown)}" in labels[1]
    assert "var(--" in plot.read_text()
    for path, code in ((tmp_path / "stats.png", "plot-not-svg"), (tmp_path / "none" / "x.svg", "cannot-write")):
        with helpers.refused(code, path):
            plot_stats(stats, path)
    with helpers.refused("bad-group-size", "--group-size 3", "8"):
        bertrain.data_stats(folder, group_size=3)


def test_unknown_words_are_counted(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("bato kese unheardof bato\n\n" * 30)
    bertrain.prepare([text], tmp_path / "data", vocab=helpers.write_vocabulary(tmp_path / "vocab.txt"))
    shards = Shards.open(tmp_path / "data")
    words = shards.read(np.arange(len(shards))).tokens.tolist()
    unknown = words.count(shards.vocabulary.id_of("[UNK]"))
    assert unknown > 0
    assert bertrain.data_stats(tmp_path / "data").unknown_share == pytest.approx(unknown / len(words))


def test_a_setting_that_is_given_twice(tmp_path: Path) -> None:
    data = helpers.make_data(tmp_path)
    command = ("pretrain", "bert-tiny", "--data", data, "--dry-run",
               *helpers.tiny_arguments(train__max_steps=2, train__precision="fp32"))  # fmt: skip
    assert helpers.bertrain(*command, "--max-steps", "2").returncode == 0, "the same value, so nothing is chosen"
    said = helpers.bertrain(*command, "--max-steps", "3", check=False)
    assert said.returncode == 2
    assert "train.max_steps" in said.stderr
    assert "[conflicting-options]" in said.stderr
    assert helpers.bertrain(*command, "--train.max_steps", "3").returncode == 0, "the last word counts"


def test_the_next_command_can_be_pasted(tmp_path: Path) -> None:
    text = Path(__file__).parents[1] / "golden" / "sample.txt"
    folder = tmp_path / "with a space"
    folder.mkdir()
    said = [
        helpers.bertrain("data", "vocab", text, "--size", "300", "--cased", "--out", folder / "vocab.txt").stdout
        for _ in range(2)
    ]
    follows = f"next: bertrain data prepare INPUT --vocab '{folder / 'vocab.txt'}' --cased --out DIR\n"
    assert said[0].endswith(f"300 words; {follows}")
    assert said[1].endswith(f"300 words, in place of what was there; {follows}")
    for cased, out in (([], "folded"), (["--cased"], "as-it-is")):
        done = helpers.bertrain(
            "data", "prepare", text, "--vocab", folder / "vocab.txt", *cased, "--out", tmp_path / out
        )
        assert ("--cased" in done.stderr) == (not cased)


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
