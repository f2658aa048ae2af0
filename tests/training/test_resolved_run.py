"""A start resolves its settings once, opens its initial weights once, and hashes them once, on any number of ranks."""

from __future__ import annotations

import hashlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from bertrain.config.settings import Settings
from bertrain.run import checkpoint
from bertrain.run.folder import Run
from bertrain.training import engine, resolved_run
from bertrain.training.announce import dry_run
from bertrain.training.finetune import finetune
from bertrain.training.start import preflight, pretrain
from tests import helpers
from tests.miniature_tasks import Miniature, settings_for

HASHED = Counter(dict.fromkeys(checkpoint.FILES, 1))
"""Every file of a checkpoint, once."""


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


def test_the_engine_is_chosen_for_the_vocabulary_of_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU it tries kernels of that size."""
    sizes, choose = set[int](), engine.choose

    def noting(settings: Settings, *rest: Any) -> Any:
        sizes.add(settings.model.vocab_size)
        return choose(settings, *rest)

    monkeypatch.setattr(engine, "choose", noting)
    preflight(helpers.tiny_settings(model__vocab_size=0), helpers.make_data(tmp_path), tmp_path / "run")
    assert sizes == {helpers.vocab_size()}
