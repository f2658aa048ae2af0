"""Quick tests neither train nor start a process: a test that does, fails."""

from __future__ import annotations

import multiprocessing.process
import subprocess
from collections.abc import Iterator
from typing import NoReturn

import pytest

from bertrain.kernels import cpu_library
from bertrain.training.state import TrainState


@pytest.fixture(autouse=True, scope="package")
def no_training_and_no_process() -> Iterator[None]:
    """Set up before fixtures of modules, so that it holds for those too."""

    def forbid(owner: type, name: str, tier: str) -> None:
        def fail(*_: object, **__: object) -> NoReturn:
            pytest.fail(f"{owner.__name__}.{name} was called in tests/quick; move this test to tests/{tier}")

        patch.setattr(owner, name, fail)

    # At their first import, NumPy 2.0 starts lscpu, and Matplotlib fc-list if it has no list of this machine's fonts.
    import matplotlib.font_manager  # noqa: F401
    import numpy.testing  # noqa: F401

    cpu_library.available()  # on CPUs with AMX, choosing an engine compiles the kernels, once in a process
    with pytest.MonkeyPatch.context() as patch:
        forbid(TrainState, "build", "training")
        forbid(subprocess.Popen, "__init__", "processes")
        forbid(multiprocessing.process.BaseProcess, "start", "processes")
        yield
