"""Settings and fixtures shared by all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from _pytest.capture import CaptureResult
from hypothesis import settings

if TYPE_CHECKING:
    from tests.miniature_tasks import Miniature

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as the command line sets it, before torch is loaded

# A deadline per example is an assertion about the clock of a shared machine.
settings.register_profile("bertrain", deadline=None, max_examples=60)
settings.load_profile("bertrain")


def unwrap(capture: pytest.CaptureFixture[str]) -> pytest.CaptureFixture[str]:
    """A capture that reads what was said without the line breaks that only keep it within 100 columns."""
    from tests.helpers import unwrapped

    read = capture.readouterr

    def readouterr() -> CaptureResult[str]:
        out, err = read()
        return CaptureResult(unwrapped(out), unwrapped(err))

    capture.readouterr = readouterr  # type: ignore[method-assign]
    return capture


@pytest.fixture
def capsys(capsys: pytest.CaptureFixture[str]) -> pytest.CaptureFixture[str]:
    return unwrap(capsys)


@pytest.fixture
def capfd(capfd: pytest.CaptureFixture[str]) -> pytest.CaptureFixture[str]:
    return unwrap(capfd)


@pytest.fixture(scope="module")
def mini(tmp_path_factory: pytest.TempPathFactory) -> Miniature:
    """Small weights, and a small table or text for each kind of task."""
    from tests import miniature_tasks

    return miniature_tasks.make_miniature(tmp_path_factory.mktemp("miniature"))


@pytest.fixture
def c_kernels() -> Iterator[None]:
    """The kernels for CPUs, on AMX or emulated; skips where they can run neither way."""
    from tests import emulated_amx

    if reason := emulated_amx.why_not():
        pytest.skip(reason)
    with emulated_amx.within():
        yield
