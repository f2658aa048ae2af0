"""The command at the head of every recipe, run as it stands: only the model and the number of steps are small."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from bertrain.config.recipe import Recipe, list_recipes
from bertrain.config.resolve import resolve
from bertrain.data.prepare.prepare import prepare
from bertrain.run.folder import Run
from bertrain.run.records import EndRecord, last_record
from tests import helpers, systems
from tests.miniature_tasks import command_line

SMALL = {key: value for key, value in helpers.TINY.items() if not key.startswith("schedule.")} | {
    "model.vocab_size": str(helpers.vocab_size()),
    "model.max_positions": "512",
    "batch.sequences": "48",  # a multiple of all batch.shares
    "batch.tokens": "0",
    "batch.token_budget": "512",
    "train.max_steps": "2",
    "train.exchange_precision": "fp32",
    "log.level": "quiet",
}
EXPERIMENT = {
    "evaluate.every_samples": "48",
    "mlperf.global_batch_size": "0",
    "mlperf.probe_accuracy": "0",
    "mlperf.clear_cache": "false",
}
TASK = {
    "data.max_seq_length": "32", "train.device": "cpu", "train.precision": "fp32", "train.threads": "1",
    "log.level": "quiet", "log.trackers": "none",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the capitals of the headers are paths."""
    made = tmp_path_factory.mktemp("headers")
    vocab = helpers.write_vocabulary(made / "vocab.txt")
    for name, documents in (("DIR", 60), ("EVAL", 8)):
        text = helpers.write_corpus(made / f"{name}.txt", documents=documents)
        prepare([text], made / name, vocab=vocab, max_seq_length=64, short_seq_prob=0.6)  # some of every length
    systems.write_phase1(made / "CHECKPOINT")
    (made / "WEIGHTS").symlink_to("CHECKPOINT")
    systems.write_glue(made / "GLUE")
    (made / "CONLL").symlink_to(Path(__file__).parents[2] / "demo" / "names")
    systems.write_squad(made / "SQUAD")
    (made / "HOSTS").write_text("node1\nnode2\n")
    return made


def command_of(recipe: Recipe) -> list[str]:
    """The words behind `bertrain` in a recipe's header, with one rank in place of more."""
    text = recipe.about.replace("\\\n", " ")
    found = re.search(r"^  bertrain (.*)$", text, re.MULTILINE)
    assert found, recipe.name
    return shlex.split(re.sub(r"--nproc \d+", "--nproc 1", found[1]))


def options(settings: dict[str, str]) -> list[str]:
    return [word for key, value in settings.items() for word in (f"--{key}", value)]


def recipes(command: str) -> list[Recipe]:
    return [recipe for recipe in list_recipes() if command in command_of(recipe)]


def launched(words: list[str], small: list[object]) -> str:
    """The script that a header's `launch` would submit."""
    return command_line(*words[:2], "--dry-run", *words[2:], *small).out


def test_headers_that_pretrain(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    for recipe in recipes("pretrain"):
        words = command_of(recipe)
        command_line(*words, *options(SMALL))
        run = Run.open(words[words.index("--run") + 1])
        assert last_record(run.folder / "metrics.jsonl", EndRecord), recipe.name
        assert run.settings.log.telemetry == (recipe.name == "gpu-variability-4x16"), "clock, power and temperature"
        given = resolve(recipe.name)
        assert run.settings.optimizer == given.optimizer
        assert run.settings.data.slice == given.data.slice


def test_headers_that_finetune(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    for recipe in recipes("finetune"):
        words = command_of(recipe)
        small = TASK | ({"task.max_query_length": "8"} if "squad" in recipe.name else {})
        is_literal = recipe.name.endswith("literal")
        small |= {"train.max_time": "1m"} if is_literal else {"train.max_steps": "2", "train.budget": ""}
        if words[0] == "launch":
            said = launched(words, [*options(small)])
            assert "#PBS -l select=2:ngpus=4:ncpus=20:mpiprocs=4" in said
            assert "-- finetune" not in said
            assert "contest-mnli-2x4" in said
            continue
        command_line(*words, *options(small))
        run = Run.open(words[words.index("--run") + 1])
        assert last_record(run.folder / "metrics.jsonl", EndRecord), recipe.name
        if is_literal:
            assert run.settings.schedule.warmup_share == 0.1
            assert (run.settings.train.epochs, resolve(recipe.name).train.max_time) == (3, "20m")


def test_headers_of_mlperf(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of each system trains to the end of an experiment; the others share its header and are resolved."""
    monkeypatch.chdir(folder)
    trained = set()
    for recipe in recipes("mlperf"):
        words, system, small = command_of(recipe), recipe.name.split("-")[1], options(SMALL | EXPERIMENT)
        ranks: list[object] = []
        if words[0] == "launch":
            assert f"--only {0}" in launched(words, [*small, "--nexp", 1]), "a task of the job"
            words, ranks = words[words.index("--") + 1 :], ["--nproc", 1, "--batch.group_size", 0]
        if system in trained:
            said = command_line(*words, *small, *ranks, "--nexp", 1, "--dry-run").out
            assert said.startswith("1 experiment into OUT")
            continue
        trained.add(system)
        words[words.index("--out") + 1] = f"OUT-{system}"
        ended = command_line(*words, *small, *ranks, "--nexp", 1, check=False)
        assert (ended.code, "no experiment reached the target (0 of 1)" in ended.out) == (1, True), ended
        assert ":::MLLOG" in (folder / f"OUT-{system}" / "result_0.txt").read_text()
    assert trained == {"intel", "nvidia", "samsung", "reference"}
