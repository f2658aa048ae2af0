"""A started `bertrain serve` or `bertrain watch --web`, and small models of every form to serve."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bertrain.training.finetune import finetune
from tests import helpers
from tests.miniature_tasks import make_miniature, settings_for


@dataclass(frozen=True)
class Server:
    process: subprocess.Popen[str]
    addresses: list[str]  # as printed

    @property
    def root(self) -> str:
        parts = urlsplit(self.addresses[0])
        return f"{parts.scheme}://{parts.netloc}"

    def connect(self, timeout: float = 120) -> http.client.HTTPConnection:
        parts = urlsplit(self.addresses[0])
        assert parts.hostname is not None
        return http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout)

    def request(
        self, path: str, body: Any = None, *, method: str = "", headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        """The status, and the body: parsed if it is JSON, else text. A body that is no bytes is sent as JSON."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection = self.connect()
        try:
            kind = {"Content-Type": "application/json"} if headers is None else headers
            connection.request(method or ("GET" if data is None else "POST"), path, data, kind)
            response = connection.getresponse()
            content, is_json = response.read(), response.getheader("content-type") == "application/json"
            return response.status, json.loads(content) if is_json else content.decode()
        finally:
            connection.close()

    def answers(self, path: str, body: Any) -> Any:
        status, content = self.request(path, body)
        assert status == 200, content
        return content["answers"]

    def refused(self, path: str, body: Any, **options: Any) -> tuple[int, str]:
        """The status and the code of a request that is refused."""
        status, content = self.request(path, body, **options)
        assert 400 <= status < 500, content
        assert content["error"]["message"]
        return status, content["error"]["code"]

    def stop(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, str]:
        """The exit code, and what it printed to stderr."""
        self.process.send_signal(number)
        _, err = self.process.communicate(timeout=120)
        return self.process.returncode, err


@contextmanager
def started(*words: object, num_addresses: int = 1) -> Iterator[Server]:
    """`bertrain WORDS --port 0`, once it has printed its addresses."""
    process = subprocess.Popen(
        helpers.command(*words, "--port", 0),
        env=helpers.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        addresses = [process.stdout.readline().strip() for _ in range(num_addresses)]
        assert all(addresses), process.stderr.read()
        yield Server(process, addresses)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


@dataclass(frozen=True)
class Models:
    """Run folders, by what they do."""

    data: Path
    fill: Path
    classify: Path
    number: Path
    labels: Path
    tag: Path
    span: Path
    embed: Path

    @property
    def all(self) -> list[Path]:
        return [self.fill, self.classify, self.number, self.labels, self.tag, self.span, self.embed]


def make_models(folder: Path) -> Models:
    mini = make_miniature(folder)
    pairs = folder / "pairs.jsonl"
    pairs.write_text("".join(json.dumps({"anchor": a, "positive": b}) + "\n" for a, b in PAIRS))
    tasks: dict[str, tuple[str, Path, dict[str, Any]]] = {
        "classify": ("classify", mini.table, {}),
        "number": ("classify", mini.numbers, {"task__target": "number"}),
        "labels": ("classify", mini.label_sets, {"task__target": "classes"}),
        "tag": ("tag", mini.names, {}),
        "span": ("squad/v1.1", mini.questions, {}),
        "embed": ("similarity", pairs, {}),
    }
    for name, (task, data, changes) in tasks.items():
        finetune(settings_for(task, train__epochs=3, **changes), data, folder / name, init=mini.base)
    return Models(folder, mini.base, *(folder / name for name in tasks))


PAIRS = [(f"bato {one}", f"{one} kese") for one in helpers.vocabulary_words()]
