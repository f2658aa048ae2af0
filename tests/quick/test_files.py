"""What is half written goes, whatever ends the writing."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from bertrain.base.files import cache_folder, existing_parent, new_folder, replacing, save_tensors


def test_a_handler_that_is_there_keeps_the_signal(tmp_path: Path) -> None:
    received = []
    before = signal.signal(signal.SIGTERM, lambda *_: received.append("SIGTERM"))
    try:
        with new_folder(tmp_path / "whole") as folder:
            signal.raise_signal(signal.SIGTERM)
            (folder / "part").write_text("whole")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert received == ["SIGTERM"]
    assert (tmp_path / "whole" / "part").read_text() == "whole"


def test_the_default_is_there_again_afterwards(tmp_path: Path) -> None:
    with new_folder(tmp_path / "whole"):
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_file_that_fails_keeps_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    with pytest.raises(UnicodeEncodeError), replacing(tmp_path / "file") as file:
        file.write("new \udc80")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "old"


def test_equal_tensors_make_equal_files(tmp_path: Path) -> None:
    metadata = {f"key {number}": "ä" * number for number in range(8)}
    written = set()
    for number in range(4):
        save_tensors({"weight é": torch.arange(6.0).view(2, 3)}, tmp_path / f"{number}.safetensors", metadata)
        written.add((tmp_path / f"{number}.safetensors").read_bytes())
    assert len(written) == 1
    with safe_open(tmp_path / "0.safetensors", "pt") as file:
        assert file.metadata() == metadata
        assert file.get_tensor("weight é").tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]


def test_what_is_cached_goes_where_nobody_else_can_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert cache_folder() == tmp_path / "cache" / "bertrain"
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    place = cache_folder()
    assert (place.parent, place.stat().st_mode & 0o777) == (tmp_path, 0o700)
    place.chmod(0o777)
    with pytest.raises(PermissionError, match="others can write"):
        cache_folder()


def test_the_closest_folder_that_exists(tmp_path: Path) -> None:
    assert existing_parent(tmp_path / "a" / "b") == tmp_path
    assert existing_parent(tmp_path) == tmp_path
