"""A start resolves its settings once, opens its initial weights once, and hashes them once, on any number of ranks."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from bertrain.run import checkpoint
from bertrain.run.folder import Run
from bertrain.training import resolved_run
from bertrain.training.announce import dry_run
from bertrain.training.finetune import finetune
from bertrain.training.start import preflight, pretrain
from tests import helpers, miniature_tasks
from tests.miniature_tasks import Miniature, settings_for

HASHED = Counter(dict.fromkeys(checkpoint.FILES, 1))
"""Every file of a checkpoint, once."""
LOG_HASHES = """
import hashlib, os
digest = hashlib.file_digest

def logged(stream, name):
    with open(os.environ["HASH_LOG"], "a") as log:
        log.write(os.environ.get("RANK", "launcher") + " " + stream.name + "\\n")
    return digest(stream, name)

hashlib.file_digest = logged
"""


@pytest.fixture(scope="module")
def mini(tmp_path_factory: pytest.TempPathFactory) -> Miniature:
    return miniature_tasks.make_miniature(tmp_path_factory.mktemp("resolved"))


class Spy:
    """Counts what is done with the files of one run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, run: Path) -> None:
        self.opened, self.num_resolved = 0, 0
        self.hashed: Counter[str] = Counter()
        read, digest, resolve = checkpoint.read_weights, hashlib.file_digest, resolved_run.resolve_auto

        def read_weights(folder: Path) -> Any:
            self.opened += folder.is_relative_to(run)
            return read(folder)

        def file_digest(stream: Any, name: str) -> Any:
            if Path(stream.name).is_relative_to(run):
                self.hashed[Path(stream.name).name] += 1
            return digest(stream, name)

        def resolve_auto(*arguments: Any) -> Any:
            self.num_resolved += 1
            return resolve(*arguments)

        monkeypatch.setattr(checkpoint, "read_weights", read_weights)
        monkeypatch.setattr(hashlib, "file_digest", file_digest)
        monkeypatch.setattr(resolved_run, "resolve_auto", resolve_auto)


@pytest.mark.parametrize("optimizer", ["reset", "keep"])
def test_pretraining_opens_and_hashes_initial_weights_once(
    mini: Miniature, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    spy = Spy(monkeypatch, mini.base)
    settings = helpers.tiny_settings(train__max_steps=1, train__init_optimizer=optimizer, log__level="quiet")
    pretrain(settings, mini.base.parent / "data", tmp_path / "run", init=str(mini.base))
    assert (spy.opened, spy.num_resolved) == (1, 1)
    assert spy.hashed == HASHED
    assert Run.open(tmp_path / "run").init_fingerprint == checkpoint.weights_digest(
        mini.base / "checkpoints" / "step-00000001"
    )


def test_finetuning_opens_and_hashes_initial_weights_once(
    mini: Miniature, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spy = Spy(monkeypatch, mini.base)
    settings = settings_for(train__max_steps=1)
    finetune(settings, mini.table, tmp_path / "run", init=str(mini.base))
    assert (spy.opened, spy.num_resolved) == (1, 1)
    assert spy.hashed == HASHED
    finetune(settings, mini.table, tmp_path / "run", init=str(mini.base))
    assert (spy.opened, spy.num_resolved) == (1, 2), "a run that has begun has its own weights"
    assert spy.hashed == HASHED


def test_nothing_is_hashed_before_ranks_start(mini: Miniature, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spy = Spy(monkeypatch, mini.base)
    settings = helpers.tiny_settings(train__max_steps=1)
    data = mini.base.parent / "data"
    resolved = preflight(settings, data, tmp_path / "run", init=str(mini.base), world=2)
    assert resolved.world == 2
    assert resolved.begun is None
    assert dry_run(settings, data, init=str(mini.base))
    assert (spy.opened, spy.num_resolved, spy.hashed) == (2, 2, Counter())
    assert not list(tmp_path.iterdir())


def test_only_the_first_of_two_ranks_hashes(mini: Miniature, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(LOG_HASHES)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))
    monkeypatch.setenv("HASH_LOG", str(tmp_path / "hashes"))
    helpers.bertrain(
        "finetune", "classify", "--init", mini.base, "--data", mini.table, "--run", tmp_path / "run", "--nproc", 2,
        *miniature_tasks.arguments(train__max_steps=1, checkpoint__enabled=False),
    )  # fmt: skip
    lines = [line.split(" ", 1) for line in (tmp_path / "hashes").read_text().splitlines()]
    of_weights = [(rank, Path(path).name) for rank, path in lines if Path(path).is_relative_to(mini.base)]
    assert Counter(of_weights) == Counter({("0", name): 1 for name in checkpoint.FILES})
