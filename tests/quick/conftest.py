"""Quick tests neither train nor start a process: a test that does, fails."""

from __future__ import annotations

import multiprocessing.process
import subprocess
from collections.abc import Iterator
from typing import NoReturn

import pytest

from bertrain.training.state import TrainState


@pytest.fixture(autouse=True, scope="package")
def no_training_and_no_process() -> Iterator[None]:
    """Set up before fixtures of modules, so that it holds for those too."""

    def forbid(owner: type, name: str, tier: str) -> None:
        def fail(*_: object, **__: object) -> NoReturn:
            pytest.fail(f"{owner.__name__}.{name} was called in tests/quick; move this test to tests/{tier}")

        patch.setattr(owner, name, fail)

    with pytest.MonkeyPatch.context() as patch:
        forbid(TrainState, "build", "training")
        forbid(subprocess.Popen, "__init__", "processes")
        forbid(multiprocessing.process.BaseProcess, "start", "processes")
        yield
