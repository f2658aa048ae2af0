"""The commands of docs/how-to-serve.md and of the live report run as written, but for the port."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from bertrain.training.finetune import finetune
from bertrain.training.start import pretrain
from tests import helpers
from tests.docs.test_documents import DOCS, actions_of, commands_of, words_of
from tests.miniature_tasks import coloured, settings_for
from tests.served import started


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl here")
def test_the_pages_run_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = helpers.tiny_settings(train__max_steps=2, log__level="quiet")
    pretrain(settings, helpers.make_data(tmp_path, documents=10), tmp_path / "runs" / "tiny")
    rows = [f"{text},{label}\n" for text, label in zip(*coloured(60, 1), strict=True)]
    (tmp_path / "labels.csv").write_text("text,label\n" + "".join(rows))
    init = str(tmp_path / "runs" / "tiny")
    finetune(settings_for(train__max_steps=2), tmp_path / "labels.csv", tmp_path / "runs" / "labels", init=init)
    monkeypatch.chdir(tmp_path)
    page = (DOCS / "how-to-serve.md").read_text()
    (command,) = (words_of(command) for command, is_whole in commands_of(page) if is_whole)
    shown = [line.strip() for line in page.splitlines() if line.startswith("    http://")]
    with started(*command, num_addresses=2) as server:
        here, there = server.root, "http://127.0.0.1:8000"
        assert [address.replace(here, there) for address in server.addresses] == shown
        requests = [action.text.replace(there, here) for action in actions_of(page)]
        assert len(requests) == 2
        for request in requests:
            done = subprocess.run(["bash", "-c", f"{request} -s"], capture_output=True, text=True, check=True)
            assert len(json.loads(done.stdout)["answers"]) == 1
    page = (DOCS / "how-to-watch.md").read_text()
    (command,) = (words_of(command) for command, _ in commands_of(page) if "--web" in command)
    with started(*command) as server:
        for path in ("/", "/runs/labels/", "/runs/tiny/", "/compare"):
            status, content = server.request(path)
            assert status == 200
            assert "tiny" in content
