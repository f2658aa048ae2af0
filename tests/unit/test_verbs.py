"""The verbs that look and tell: recipes, settings, doctor, vocab, stats; their JSON and their Python twins."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

import bertrain
from bertrain.base import isa
from bertrain.base.errors import UserError
from bertrain.config.resolve import recipe_names
from bertrain.data.feed.batching import POLICIES
from bertrain.data.formats.shards import Shards
from bertrain.data.text.tokenizer import Vocabulary
from tests import helpers


def test_every_name_of_the_package_is_there_and_documented() -> None:
    for name in bertrain.__all__:
        assert getattr(bertrain, name).__doc__, name
    with pytest.raises(AttributeError, match="bertrain has no 'trian'"):
        _ = bertrain.trian


def test_recipes_and_settings() -> None:
    listed = json.loads(helpers.bertrain("recipes", "--json").stdout)
    assert sorted(listed) == recipe_names()
    assert "[optimizer]" in helpers.bertrain("recipes", "bert-tiny").stdout
    described = json.loads(helpers.bertrain("settings", "--json").stdout)
    assert {"model.nsp", "batch.token_budget", "log.level"} <= {entry["name"] for entry in described}
    assert all(entry["help"] for entry in described)
    assert helpers.bertrain("settings", "optimiser", check=False).returncode == 2


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
    with pytest.raises(UserError, match=r"has only \d+ word pieces to offer"):
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
    with pytest.raises(UserError, match="cannot hold the longest example"):
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
    bertrain.plot_stats(stats, plot)
    root = ElementTree.parse(plot).getroot()
    labels = [element.attrib["aria-label"] for element in root.iter() if "aria-label" in element.attrib]
    assert len(labels) == 2
    for entry in stats.policies:
        shown = (entry.padding, entry.token_imbalance - 1, entry.attention_imbalance - 1)
        assert f"{entry.policy} {', '.join(f'{value:.1%}' for value in shown)}" in labels[1]
    assert "var(--" in plot.read_text()
    for path, code in ((tmp_path / "stats.png", "plot-not-svg"), (tmp_path / "none" / "x.svg", "cannot-write")):
        with helpers.refused(code, path):
            bertrain.plot_stats(stats, path)
    with pytest.raises(UserError, match="--group-size 3 does not divide the number of ranks, which is 8"):
        bertrain.data_stats(folder, group_size=3)


def test_unknown_words_are_counted(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("bato kese unheardof bato\n\n" * 30)
    bertrain.prepare([text], tmp_path / "data", vocab=helpers.write_vocabulary(tmp_path / "vocab.txt"))
    shards = Shards.open(tmp_path / "data")
    words = shards.gather(np.arange(len(shards))).tolist()
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
    assert "train.max_steps is given twice, as 2 and as 3; leave one of them out" in said.stderr
    said = helpers.bertrain(*command, "--precision", "bf16", check=False)
    assert said.returncode == 2
    assert "train.precision is given twice, as fp32 and as bf16; leave one of them out" in said.stderr
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
        assert ("with capitals, which text in lower case never meets" in done.stderr) == (not cased)


def test_precision_as_intels_scripts_name_it(tmp_path: Path) -> None:
    data = helpers.make_data(tmp_path)
    command = ("pretrain", "bert-tiny", "--data", data, "--dry-run", *helpers.tiny_arguments(train__max_steps=2))
    said = helpers.bertrain(*command, "--precision", "avx-fp32", check=False)
    if "avx512bw" in isa.cpu_flags():
        assert said.returncode == 0
        assert "fp32" in said.stdout
    else:
        assert said.returncode == 2
        assert "train.isa avx512 is not possible here" in said.stderr
    refused = helpers.bertrain(*command, "--precision", "avx-fp32", "--isa", "amx", check=False)
    assert refused.returncode == 2
    assert "--precision avx-fp32 is fp32 up to avx512, and --isa says amx" in refused.stderr
