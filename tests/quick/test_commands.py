"""The commands that look and tell: recipes, settings, doctor, vocab, stats; their JSON and their Python twins."""

from __future__ import annotations

import ast
import os
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import typer

import bertrain
from bertrain.cli.main import app, main
from bertrain.cli.options import TRAINING_OPTIONS, join_overrides, latency_text
from bertrain.config.resolve import SYNONYMS, TYPES, WORDS, describe, find_settings, parse_overrides
from bertrain.data.feed.stats import data_stats
from bertrain.data.formats.shards import Shards
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


def test_commands_that_train_take_the_same_short_options() -> None:
    root: Any = typer.main.get_command(app)
    commands = [root.commands["pretrain"], root.commands["finetune"], root.commands["mlperf"].commands["run"]]
    names = {entry["name"]: entry for entry in describe()}
    for option in TRAINING_OPTIONS:
        assert option.setting in names
        found = [next(one for one in command.params if option.option in one.opts) for command in commands]
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
        ([], [("train.epochs", "2"), ("train.max_steps", "5")]),
    ):
        with helpers.refused("conflicting-options"):
            join_overrides(one, other)


def test_padded_fill_worked_out_by_hand(tmp_path: Path) -> None:
    """With one rank and room for a whole step, the padded policy computes whole rectangles of four sizes."""
    folder = helpers.make_data(tmp_path)
    shards = Shards.open(folder)
    longest = int(shards.lengths.max())
    stats = data_stats(folder, ranks=1, sequences=16, token_budget=16 * longest)
    padded = next(entry for entry in stats.policies if entry.policy == "padded")
    from bertrain.data.feed.batching import rows_at

    real = sum(int(shards.lengths[rows_at(np.arange(16 * k, 16 * k + 16), len(shards), 1)[1]].sum()) for k in range(20))
    assert padded.padding == pytest.approx(1 - real / (20 * 16 * longest))
    assert padded.token_imbalance == 1


def test_stats_draw_what_they_print(tmp_path: Path) -> None:
    folder = helpers.make_data(tmp_path)
    plot = tmp_path / "stats.svg"
    stats = data_stats(folder, ranks=4, sequences=32)
    plot_stats(stats, plot)
    root = ElementTree.parse(plot).getroot()
    labels = [element.attrib["aria-label"] for element in root.iter() if "aria-label" in element.attrib]
    assert len(labels) == 2
    for entry in stats.policies:
        shown = (entry.padding, entry.token_imbalance - 1, entry.attention_imbalance - 1)
        assert f"{entry.policy} {', '.join(f'{value:.1%}' for value in shown)}" in labels[1]
    assert "var(--" in plot.read_text()
    for path, code in ((tmp_path / "stats.png", "plot-not-svg"), (tmp_path / "none" / "x.svg", "unwritable-file")):
        with helpers.refused(code, path):
            plot_stats(stats, path)


def test_unknown_words_are_counted(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("bato kese unheardof bato\n\n" * 30)
    bertrain.prepare([text], tmp_path / "data", vocab=helpers.write_vocabulary(tmp_path / "vocab.txt"))
    shards = Shards.open(tmp_path / "data")
    words = shards.read(np.arange(len(shards))).tokens.tolist()
    unknown = words.count(shards.vocabulary.id_of("[UNK]"))
    assert unknown > 0
    assert data_stats(tmp_path / "data").unknown_share == pytest.approx(unknown / len(words))


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--lr 1e-4", "optimizer.learning_rate"),
        ("--learning-rate 1e-4", "optimizer.learning_rate"),
        ("--batch-size 32", "batch.sequences"),
        ("--num-train-epochs=3", "train.epochs"),
        ("--warmup 10", "schedule.warmup_steps"),
        ("--max-seq-length 128", "data.max_seq_length"),
        ("--weight-decay 0.1", "optimizer.weight_decay"),
        ("--fp16", "--precision fp16"),
        ("--gradient-accumulation-steps 4", "batch.sequences"),
        ("--wandb", "log.trackers"),
        ("--output-dir out", "--run"),
    ],
)
def test_words_of_other_programs_lead_to_settings(words: str, named: str) -> None:
    with helpers.refused("unknown-option", words.split()[0].split("=")[0], named):
        parse_overrides(words.split())


def test_every_word_means_a_setting_or_says_what_to_do() -> None:
    for word, meaning in SYNONYMS.items():
        assert word not in TYPES
        assert meaning in TYPES or " " in meaning, f"{word} means {meaning}, which is no setting"


def test_settings_are_found_by_words() -> None:
    def found(query: str) -> list[str]:
        return [entry["name"] for entry in find_settings(query)]

    assert found("optimizer") == [entry["name"] for entry in describe("optimizer")]
    assert found("lr") == found("LR") == ["optimizer.learning_rate"]
    assert found("learning rate")[0] == found("learning_rate")[0] == "optimizer.learning_rate"
    assert {"model.hidden_dropout", "model.attention_dropout", "model.head_dropout"} <= set(found("dropout")[:3])
    assert "train.precision" in found("loss scaling"), "by its help"
    with helpers.refused("unknown-setting", "optimiser", "optimizer"):
        find_settings("optimiser")
    with helpers.refused("unknown-setting", "'learning'"):
        find_settings("lerning")
    assert found("wandb")[0] == "log.trackers"


def run_main(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """The exit code of the command line, in this process."""
    monkeypatch.setattr("sys.argv", ["bertrain", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_help_is_where_people_look_for_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for words in (["--help"], ["-h"], ["help"], []):
        assert run_main(monkeypatch, *words) == 0
        shown.append(capsys.readouterr().out.strip())
    assert len(set(shown)) == 1
    assert "..." not in shown[0].partition("Options:")[2], "no description is cut"
    root: Any = typer.main.get_command(app)
    headings = {name for names in WORDS["headings"].values() for name in names.split()}
    assert {name for name, command in root.commands.items() if not command.hidden} <= headings
    assert all(f"{heading}:" in shown[0] for heading in WORDS["headings"])
    for words in (["help", "weights", "show"], ["weights", "show", "-h"]):
        assert run_main(monkeypatch, *words) == 0
        assert "Usage: bertrain weights show" in capsys.readouterr().out
    assert run_main(monkeypatch, "pretrain") == 2
    said = capsys.readouterr()
    assert "Usage: bertrain pretrain" in said.out
    assert "bertrain pretrain --help" in said.out
    assert "--max-steps N" not in said.out, "only what is required"
    assert "RECIPE" in said.err
    assert "[usage]" in said.err
    assert run_main(monkeypatch, "pretrain", "bert-tiny") == 2
    assert "Usage:" not in capsys.readouterr().out, "something was given: one sentence is enough"


@pytest.mark.parametrize(("words", "named"), [("train --hepl", "--help"), ("finetune classify --datta x", "--data")])
def test_a_misspelt_option_is_named_before_a_missing_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str, named: str
) -> None:
    assert run_main(monkeypatch, *words.split()) == 2
    said = capsys.readouterr().err
    assert f"did you mean '{named}'? [unknown-option]" in said
    assert said.count("\n") == 1


def test_an_option_of_launch_that_is_missing_is_named_before_a_command_with_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main(monkeypatch, "launch", "ssh", "--", "pretrain", "bert-tiny", "--data", "x", "--run", "y") == 2
    assert capsys.readouterr().err.startswith("bertrain: missing option '--hostfile'; see `bertrain launch ssh --help`")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
@pytest.mark.parametrize("words", [["--version"], ["settings"], ["launch", "ssh"]])
def test_output_that_a_full_disk_or_a_closed_pipe_does_not_take(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    read, write = os.pipe()
    os.close(read)
    for place, code, said in (("/dev/full", 2, "No space left on device"), (write, 1, "")):
        with open(place, "w") as out, monkeypatch.context() as patched:
            patched.setattr("sys.stdout", out)
            assert run_main(monkeypatch, *words) == code
        assert said in (err := capsys.readouterr().err)
        assert err.count("\n") == bool(said)


def test_help_takes_the_width_of_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    widths = {}
    for columns in (80, 160):
        monkeypatch.setenv("COLUMNS", str(columns))
        with redirect_stdout(StringIO()) as out:  # `capsys` joins lines
            assert run_main(monkeypatch, "train", "--help") == 0
        widths[columns] = max(map(len, out.getvalue().splitlines()))
    assert widths[80] <= 80 < widths[160] <= 160


def test_commands_that_are_not_there_and_systems_that_are_not_supported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for command, named in (("compare", "bertrain report"), ("prepare", "data prepare")):
        assert run_main(monkeypatch, command, "x") == 2
        said = capsys.readouterr().err
        assert named in said
        assert "[unknown-command]" in said
    assert run_main(monkeypatch, "pretrian") == 2
    assert "pretrain" in capsys.readouterr().err
    for system in ("Windows", "Darwin"):
        monkeypatch.setattr("platform.system", lambda system=system: system)
        assert run_main(monkeypatch, "recipes") == 2
        assert f"{system} [unsupported-system]" in capsys.readouterr().err


def test_latencies_of_a_second_and_more_are_plain_numbers() -> None:
    shown = latency_text({"latency_ms_p50": 999.6, "latency_ms_p99": 1020.4})
    assert shown == "a batch took 999.6 ms (p50), 1,020 ms (p99)"
