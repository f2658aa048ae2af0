"""Weights by their name on the Hugging Face hub, fetched from a server of our own that speaks as much of its API."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from bertrain.data.formats.source import open_data
from bertrain.weights.huggingface import write_folder
from bertrain.weights.inspect import show_weights
from bertrain.weights.tensors import Weights
from tests import helpers

COMMIT = "0123456789abcdef0123456789abcdef01234567"
ROOT = Path(__file__).parents[2]


class Hub(BaseHTTPRequestHandler):
    """One repository, `org/tiny`, with the files of a folder."""

    folder: Path
    asked: list[str]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        self.asked.append(path)
        files = {file.name: file.read_bytes() for file in self.folder.iterdir()}
        blobs = {name: hashlib.sha1(content).hexdigest() for name, content in files.items()}
        if path in ("/api/models/org/tiny", "/api/models/org/tiny/revision/main"):
            siblings = [{"rfilename": name} for name in files]
            self.answer(json.dumps({"id": "org/tiny", "sha": COMMIT, "siblings": siblings}).encode())
        elif path == f"/api/models/org/tiny/tree/{COMMIT}":
            tree = [{"type": "file", "path": n, "size": len(files[n]), "oid": blobs[n]} for n in files]
            self.answer(json.dumps(tree).encode())
        elif path.startswith(f"/org/tiny/resolve/{COMMIT}/") and (name := path.rpartition("/")[2]) in files:
            self.answer(files[name], {"ETag": f'"{blobs[name]}"', "X-Repo-Commit": COMMIT})
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def answer(self, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(200)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, format: str, *arguments: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return helpers.make_data(tmp_path_factory.mktemp("hub"), documents=10)


@pytest.fixture
def hub(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    """A hub with weights, a picture that nobody needs, and an empty cache on this side."""
    settings = helpers.tiny_settings().model
    tensors = dict(helpers.build_model(settings).state_dict())
    write_folder(tmp_path / "served", Weights("made", "", tensors, settings, open_data(data).vocabulary))
    (tmp_path / "served" / "picture.png").write_bytes(b"large")
    served = type("Served", (Hub,), {"folder": tmp_path / "served", "asked": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), served) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
        monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.chdir(tmp_path)
        yield served
        server.shutdown()


def test_weights_are_fetched_by_name(hub: type[Hub], data: Path, tmp_path: Path) -> None:
    shown = json.loads(helpers.bertrain("weights", "show", "hub:org/tiny", "--json").stdout)
    assert shown["words"] == helpers.vocab_size()
    assert Path(shown["origin"]).is_relative_to(tmp_path / "cache")
    assert not any("picture" in path for path in hub.asked)
    assert any(path.endswith("model.safetensors") for path in hub.asked)
    hub.asked.clear()
    helpers.bertrain("fill-mask", "hub:org/tiny", "bato [MASK] kese")
    assert not any(path.endswith("model.safetensors") for path in hub.asked), "it is in the cache"
    helpers.bertrain("weights", "export", f"hub:org/tiny@{COMMIT}", "--out", tmp_path / "exported")
    helpers.bertrain("weights", "compare", tmp_path / "exported", tmp_path / "served")


def test_runs_begin_with_weights_of_the_hub(hub: type[Hub], data: Path, tmp_path: Path) -> None:
    begin = ("pretrain", "bert-tiny", "--data", data, "--init", "hub:org/tiny", "--run", tmp_path / "run",
             "--max-steps", "1", "--batch-size", "4", "--lr", "1e-4")  # fmt: skip
    assert "model.hidden_size 32" in helpers.bertrain(*begin).stdout
    assert json.loads((tmp_path / "run" / "config.json").read_text())["init"]["source"] == "hub:org/tiny"
    helpers.bertrain(*begin)  # continued: it is the same run
    glue = ROOT / "tests" / "data" / "glue"
    tuned = ("finetune", "glue/sst2", "--init", "hub:org/tiny", "--data", glue, "--run", tmp_path / "sst2")
    assert "model.hidden_size = 32" in helpers.bertrain(*tuned, "--data.max_seq_length", "64", "--dry-run").stdout


def test_without_permission_nothing_is_fetched(hub: type[Hub], tmp_path: Path) -> None:
    for name in ("tiny", "org/tiny"):
        with helpers.refused("missing-weights", f"hub:{name}"):
            show_weights(name)
    (tmp_path / "runs").mkdir()
    with helpers.refused("missing-weights", "runs/none") as caught:
        show_weights("runs/none")
    assert "hub:" not in str(caught.value), "a path it is"
    assert not hub.asked


def test_names_that_the_hub_does_not_have(hub: type[Hub]) -> None:
    for name in ("hub:org/none", "hub:not a name"):
        said = helpers.bertrain("weights", "show", name, check=False)
        assert said.returncode == 2
        assert "[failed-download]" in said.stderr
        assert said.stderr.count("\n") == 1, said.stderr
