"""A web server in this process: listens, prints its address, and on SIGTERM or Ctrl-C finishes what it has begun."""

from __future__ import annotations

import errno
import resource
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bertrain.base.console import remark
from bertrain.base.errors import UserError
from bertrain.base.extras import import_extra
from bertrain.ranks.signals import handling

LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
DRAIN_S = 60  # the longest wait for requests in flight when the server stops


def check_server_library() -> None:
    """Refuse to start without the packages of the extra `serve`."""
    import_extra("starlette")
    import_extra("uvicorn")


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens; port 0 is any that is free."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UserError("port-in-use", f"port {port} of {host} is in use; choose another with --port") from None
        raise UserError(
            "cannot-listen",
            f"cannot listen on port {port} of {host}: {error.strerror or error}; check --host and --port",
        ) from None


def address_of(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def for_this_machine(app: Any) -> Any:
    """`app` for requests that name this machine: a site whose name was made to mean 127.0.0.1 could read all else."""
    from starlette.responses import PlainTextResponse

    async def checked(scope: Any, receive: Any, send: Any) -> None:
        hosts = [value.decode("latin-1") for name, value in scope.get("headers", ()) if name == b"host"]
        if all(_name_of(host) in LOCAL_NAMES for host in hosts):
            await app(scope, receive, send)
        else:
            refusal = f"{hosts[0]} is not this machine; use localhost, or let the server listen with --host\n"
            await PlainTextResponse(refusal, 421)(scope, receive, send)

    return checked


def _name_of(host: str) -> str | None:
    with suppress(ValueError):
        return urlsplit(f"//{host}").hostname
    return None


def run_server(app: Any, listening: socket.socket) -> None:
    """Serve until SIGTERM or SIGINT; then finish the requests in flight."""
    uvicorn = import_extra("uvicorn")
    if listening.getsockname()[0] in LOCAL_NAMES:
        app = for_this_machine(app)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each connection is an open file
    config = uvicorn.Config(
        app, loop="asyncio", http="h11", ws="none", lifespan="off", log_level="error", access_log=False,
        server_header=False, timeout_graceful_shutdown=DRAIN_S,
    )  # fmt: skip
    server = uvicorn.Server(config)

    def stop(number: int, frame: object) -> None:
        server.should_exit = True  # uvicorn raises the signal again once it has ended

    with handling((signal.SIGTERM, signal.SIGINT), stop):
        server.run(sockets=[listening])


def serve(
    sources: list[str] | list[Path], *, host: str = "127.0.0.1", port: int = 8000, which: str = "newest",
    device: Any = "auto", overrides: Sequence[tuple[str, str]] = (),
) -> None:  # fmt: skip
    """Serve models until the process is stopped; `overrides` are settings of fine-tuned ones."""
    check_server_library()
    from bertrain.serving.app import RESERVED, build_app
    from bertrain.serving.models import open_models

    with (
        listen(host, port) as listening,  # first: weights may take minutes to read
        open_models(sources, which=which, device=device, overrides=overrides, reserved=RESERVED) as models,
    ):
        address = address_of(listening)
        for one in models:
            remark(f"{one.source}: {one.model.form}, {one.about['reads']}")
            print(f"{address}/{one.name}/", flush=True)
        remark(f"API: {address}/docs; Ctrl-C stops the server")
        run_server(build_app(models), listening)


def watch_web(folder: str | Path, *, host: str = "127.0.0.1", port: int = 8001, every_s: float = 2.0) -> None:
    """Serve the reports of a run, or of the runs in a folder, until the process is stopped."""
    check_server_library()
    from bertrain.serving.live import LiveReports, build_live_app

    reports = LiveReports(Path(folder), every_s)
    with listen(host, port) as listening:
        print(f"{address_of(listening)}/", flush=True)
        remark("Ctrl-C stops the server")
        run_server(build_live_app(reports), listening)
