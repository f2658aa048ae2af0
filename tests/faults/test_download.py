"""Downloads from a real HTTP server that breaks off, truncates, corrupts, ignores ranges and is busy."""

from __future__ import annotations

import hashlib
import json
import random
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import bertrain.data.text.download as downloads
from bertrain.data.text.download import RemoteFile, download, fetch
from tests import helpers

CONTENT = random.Random(1).randbytes(300_000)


def md5(data: bytes) -> str:
    return hashlib.md5(data).hexdigest()


class Server(ThreadingHTTPServer):
    """Serves `files`; `faults` are spent one a request."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.faults: list[str] = []
        self.ranges: list[str | None] = []
        self.knows_ranges = True
        self.says_length = True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        asked = self.headers.get("Range")
        self.server.ranges.append(asked)
        fault = self.server.faults.pop(0) if self.server.faults else ""
        if fault.isdecimal():
            self.send_response(int(fault))
            self.end_headers()
            return
        content = self.server.files.get(self.path)
        if content is None:
            self.send_error(404)
            return
        start = 0
        if asked and self.server.knows_ranges:
            start = int(re.fullmatch(r"bytes=(\d+)-", asked)[1])  # type: ignore[index]
            if start >= len(content):
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{len(content)}")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        else:
            self.send_response(200)
        body = content[start:]
        if self.server.says_length:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if fault == "corrupt":
            body = bytes([body[0] ^ 1]) + body[1:]
        if fault.startswith("break"):
            body = body[: int(fault.removeprefix("break"))]
        self.wfile.write(body)


@pytest.fixture(scope="module")
def one_server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def server(one_server: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    monkeypatch.setattr(downloads, "FIRST_WAIT_S", 0.0)
    one_server.files = {"/a.bin": CONTENT}
    one_server.faults, one_server.ranges = [], []
    one_server.knows_ranges = one_server.says_length = True
    return one_server


def the_file(server: Server) -> RemoteFile:
    return RemoteFile("folder/a.bin", f"{server.url}/a.bin", md5(CONTENT))


def assert_nothing_is_taken_for_whole(out: Path) -> None:
    assert not (out / "folder" / "a.bin").exists()


def test_it_goes_on_after_every_break(server: Server, tmp_path: Path) -> None:
    server.faults = ["break1000", "503", "break70000", "429", "break0", "500"]
    assert fetch(the_file(server), tmp_path)
    assert (tmp_path / "folder" / "a.bin").read_bytes() == CONTENT
    assert server.ranges == [None, *["bytes=1000-"] * 2, *["bytes=71000-"] * 4]
    assert not list(tmp_path.rglob(".*"))
    assert not fetch(the_file(server), tmp_path)
    assert len(server.ranges) == 7  # nothing was asked again


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    faults=st.lists(
        st.one_of(st.sampled_from(["503", "502"]), st.integers(0, 300_000).map("break{}".format)), max_size=6
    ),
    knows_ranges=st.booleans(),
    left=st.integers(0, 310_000),
)
def test_any_history_ends_in_the_same_file(
    server: Server, tmp_path_factory: pytest.TempPathFactory, faults: list[str], knows_ranges: bool, left: int
) -> None:
    out = tmp_path_factory.mktemp("out")
    (out / "folder").mkdir()
    (out / "folder" / ".a.bin.partial").write_bytes((CONTENT + bytes(10_000))[:left])
    server.faults, server.knows_ranges = list(faults), knows_ranges
    assert fetch(the_file(server), out)
    assert (out / "folder" / "a.bin").read_bytes() == CONTENT


def test_it_says_that_it_tries_again(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server.faults = ["503"]
    fetch(the_file(server), tmp_path)
    assert re.search(r"HTTP 503 .* 0 s", capsys.readouterr().err)


def test_a_later_run_goes_on(server: Server, tmp_path: Path) -> None:
    server.faults = ["break5000", *["break0"] * downloads.ATTEMPTS_WITHOUT_PROGRESS]
    with helpers.refused("download-failed", "a.bin", "8 times"):
        fetch(the_file(server), tmp_path)
    assert_nothing_is_taken_for_whole(tmp_path)
    fetch(the_file(server), tmp_path)
    assert server.ranges[-1] == "bytes=5000-"
    assert (tmp_path / "folder" / "a.bin").read_bytes() == CONTENT


def test_a_server_that_ignores_ranges(server: Server, tmp_path: Path) -> None:
    server.knows_ranges = False
    server.faults = ["break5000", "break200000"]
    fetch(the_file(server), tmp_path)
    assert (tmp_path / "folder" / "a.bin").read_bytes() == CONTENT


def test_corrupt_content_is_not_kept(server: Server, tmp_path: Path) -> None:
    server.faults = ["corrupt"]
    with helpers.refused("wrong-checksum", "a.bin"):
        fetch(the_file(server), tmp_path)
    assert not list((tmp_path / "folder").iterdir())


def test_a_bad_beginning_is_fetched_anew(server: Server, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / ".a.bin.partial").write_bytes(b"an older version of the file")
    fetch(the_file(server), tmp_path)
    assert server.ranges == ["bytes=28-", None]
    assert (tmp_path / "folder" / "a.bin").read_bytes() == CONTENT


@pytest.mark.parametrize("content", [CONTENT[:-1], CONTENT + b"x"])
@pytest.mark.parametrize("says_length", [True, False])
def test_another_length_than_published(server: Server, tmp_path: Path, content: bytes, says_length: bool) -> None:
    server.files["/a.bin"], server.says_length = content, says_length
    with helpers.refused("wrong-checksum", "a.bin"):
        fetch(the_file(server), tmp_path)
    assert_nothing_is_taken_for_whole(tmp_path)


def test_a_complete_part(server: Server, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / ".a.bin.partial").write_bytes(CONTENT)
    assert fetch(the_file(server), tmp_path)
    assert (tmp_path / "folder" / "a.bin").read_bytes() == CONTENT
    assert server.ranges == [f"bytes={len(CONTENT)}-"], "killed before its checksum, it is not fetched again"


def test_options_of_another_collection(tmp_path: Path) -> None:
    for options in ({"language": "de"}, {"date": "20260101"}):
        with helpers.refused("option-without-effect", f"--{min(options)}"):
            download("mlperf", tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_a_file_altered_later_is_not_taken_for_right(server: Server, tmp_path: Path) -> None:
    fetch(the_file(server), tmp_path)
    (tmp_path / "folder" / "a.bin").write_bytes(CONTENT[:-1] + b"x")
    with helpers.refused("wrong-checksum", tmp_path / "folder" / "a.bin"):
        fetch(the_file(server), tmp_path)


@pytest.mark.parametrize(
    ("url", "code", "named"),
    [
        ("{}/none", "http-error", "HTTP 404 Not Found"),
        ("http://127.0.0.1:9/a", "download-failed", "Connection refused"),
        ("nonsense", "bad-url", "nonsense"),
        ("file:///etc/hostname", "bad-url", "file:///etc/hostname"),
        ("http://[::1/a", "bad-url", "http://[::1/a"),
        ("http://127.0.0.1/a\x01b", "bad-url", "http://127.0.0.1/a"),
    ],
)
def test_addresses_that_lead_nowhere(server: Server, tmp_path: Path, url: str, code: str, named: str) -> None:
    with helpers.refused(code, named):
        fetch(RemoteFile("a", url.format(server.url), md5(b"")), tmp_path)


def serve_wikipedia(server: Server) -> None:
    name = "simplewiki-20260101-pages-articles-multistream.xml.bz2"
    sums = f"{'0' * 32}  simplewiki-20260101-pages-articles.xml.bz2\n{md5(CONTENT)}  {name}\n"
    server.files["/simplewiki/latest/simplewiki-latest-md5sums.txt"] = sums.encode()
    server.files[f"/simplewiki/20260101/{name}"] = CONTENT


def test_wikipedia(server: Server, tmp_path: Path) -> None:
    serve_wikipedia(server)
    server.faults = ["503"]
    arguments = ("--language", "simple", "--mirror", server.url, "--json")
    done = helpers.bertrain("data", "download", "wikipedia", "--out", tmp_path, *arguments)
    name = "simplewiki-20260101-pages-articles-multistream.xml.bz2"
    assert json.loads(done.stdout)["fetched"] == [name]
    assert (tmp_path / name).read_bytes() == CONTENT
    del server.files["/simplewiki/latest/simplewiki-latest-md5sums.txt"]
    with helpers.refused("http-error", "md5sums.txt", "HTTP 404"):
        download("wikipedia", tmp_path, mirror=server.url, language="simple")


def serve_mlperf(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = {"bert_config.json": b"{}", "vocab.txt": b"[PAD]\n", "tf2_ckpt/model.index": b"2", "enwiki-1.bz2": b"x"}
    inputs["tf1_ckpt/model.ckpt-28252.index"] = b"index"
    text = {"results4/part-00000-of-00500": b"A sentence.\n", "results4/eval.txt": b"Held out.\n"}
    known = {"vocab.txt": (6, md5(b"[PAD]\n")), "part-00000-of-00500": (12, md5(b"A sentence.\n"))}
    monkeypatch.setattr(downloads, "MLPERF_FILES", known)
    for manifest, files in (("bert-input-files", inputs), ("bert-preprocessed-wikipedia-dataset", text)):
        server.files[f"/metadata/{manifest}.uri"] = f"https://elsewhere.example/store/{manifest}\n".encode()
        lines = [f"{md5(data)}  ./{name}\n" for name, data in files.items()]
        server.files[f"/metadata/{manifest}.md5"] = "".join(lines).encode()
        server.files |= {f"/store/{manifest}/{name}": data for name, data in files.items()}


def test_mlperf(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve_mlperf(server, monkeypatch)
    made = download("mlperf", tmp_path, mirror=server.url)
    assert made["left_out"] == ["tf2_ckpt/model.index", "enwiki-1.bz2"]
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()) == [
        "download/results4/eval.txt",
        "download/results4/part-00000-of-00500",
        "phase1/bert_config.json",
        "phase1/model.ckpt-28252.index",
        "phase1/vocab.txt",
    ]
    assert download("mlperf", tmp_path, mirror=server.url)["fetched"] == []


def test_manifests_that_lie(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve_mlperf(server, monkeypatch)
    server.files["/metadata/bert-input-files.md5"] = f"{'0' * 32}  vocab.txt\n".encode()
    with helpers.refused("wrong-checksum", "vocab.txt", "0" * 32):
        download("mlperf", tmp_path, mirror=server.url)
    server.files["/metadata/bert-input-files.md5"] = f"{'0' * 32}  ../../vocab.txt\n".encode()
    with helpers.refused("bad-checksum-list", "../../vocab.txt"):
        download("mlperf", tmp_path, mirror=server.url)
    server.files["/metadata/bert-input-files.md5"] = b"<html>login</html>"
    with helpers.refused("bad-checksum-list", "bert-input-files.md5"):
        download("mlperf", tmp_path, mirror=server.url)
