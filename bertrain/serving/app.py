"""`bertrain serve`: models as web pages to try and as a JSON API. Requests that wait are computed together.

GET  /NAME/           the page of a model
POST /NAME/OPERATION  its API
GET  /docs            the API for people; /openapi.json for programs
GET  /health          answers while the server is up
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import FileSystemLoader

import bertrain
from bertrain.base.errors import UserError
from bertrain.reports.page import TEMPLATES
from bertrain.serving.models import NamedModel, answer_together
from bertrain.serving.openapi import describe
from bertrain.serving.requests import MAX_BODY, Ask, parse

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

RESERVED = ("docs", "health", "openapi.json")
BODY_S = 30.0  # to send a whole body
MAX_WAITING = 10_000  # requests of one model
TEXTS_TOGETHER, BYTES_TOGETHER = 1000, 1 << 18  # from which on no further request joins a batch
STATUS = {
    "malformed-body": 400,
    "slow-body": 408,
    "body-too-large": 413,
    "text-too-long": 413,
    "sentence-too-long": 413,
    "not-json": 415,
    "server-busy": 503,
}  # of other errors: 422
PAGES = TEMPLATES.overlay(loader=FileSystemLoader([Path(__file__).parent, Path(TEMPLATES.loader.searchpath[0])]))  # type: ignore[union-attr]
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
}  # a page asks for nothing elsewhere, whatever a text or a label holds


class Batcher:
    """Answers requests to one model: those that come while it computes are computed together next."""

    def __init__(self, model: NamedModel, worker: ThreadPoolExecutor) -> None:
        self._model, self._worker = model, worker
        self._waiting: deque[tuple[Ask, asyncio.Future[list[Any]]]] = deque()
        self._working: asyncio.Task[None] | None = None

    async def answer(self, ask: Ask) -> list[Any]:
        if len(self._waiting) >= MAX_WAITING:
            raise UserError("server-busy", f"{MAX_WAITING:,} requests are waiting; send this one again later")
        future: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        self._waiting.append((ask, future))
        if self._working is None or self._working.done():
            self._working = asyncio.create_task(self._work())
        return await future

    async def _work(self) -> None:
        while self._waiting:
            taken, num_texts, num_bytes = [], 0, 0
            while self._waiting and num_texts < TEXTS_TOGETHER and num_bytes < BYTES_TOGETHER:
                taken.append(self._waiting.popleft())
                ask = taken[-1][0]
                num_texts, num_bytes = num_texts + len(ask.texts), num_bytes + ask.num_bytes
            asks = [ask for ask, _ in taken]
            loop = asyncio.get_running_loop()
            found = await loop.run_in_executor(self._worker, answer_together, self._model, asks)
            for (_, future), answers in zip(taken, found, strict=True):
                if future.cancelled():
                    continue
                if isinstance(answers, Exception):
                    future.set_exception(answers)
                else:
                    future.set_result(answers)


def build_app(models: Sequence[NamedModel]) -> Starlette:
    """The application that serves these models."""
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse
    from starlette.routing import Route

    worker = ThreadPoolExecutor(1, "bertrain-serve")  # models share the device
    by_name = {one.name: (one, Batcher(one, worker)) for one in models}
    schema = describe(models)

    async def answer(request: Request) -> Response:
        named = by_name.get(request.path_params["name"])
        operation = named[0].operation(request.path_params["operation"]) if named else None
        if named is None or operation is None:
            raise HTTPException(404)
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise UserError("not-json", "send JSON, with the header Content-Type: application/json")
        ask = parse(operation, await read_body(request))
        return JSONResponse({"answers": await named[1].answer(ask)})

    async def try_page(request: Request) -> Response:
        named = by_name.get(request.path_params["name"])
        if named is None:
            raise HTTPException(404)
        return HTMLResponse(render("try.html.j2", model=named[0]), headers=HEADERS)

    async def index(request: Request) -> Response:
        if len(by_name) == 1:
            return RedirectResponse(f"{next(iter(by_name))}/")
        return HTMLResponse(render("models.html.j2", models=models), headers=HEADERS)

    async def docs(request: Request) -> Response:
        host = request.headers.get("host", "")
        return HTMLResponse(render("api.html.j2", models=models, host=host, max_body=MAX_BODY), headers=HEADERS)

    async def openapi(request: Request) -> Response:
        return JSONResponse(schema)

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok", "models": list(by_name)})

    routes = [
        Route("/", index),
        Route("/docs", docs),
        Route("/openapi.json", openapi),
        Route("/health", health),
        Route("/{name}/", try_page),
        Route("/{name}/{operation}", answer, methods=["POST"]),
    ]
    return Starlette(routes=routes, exception_handlers=error_handlers())


def render(template: str, **values: Any) -> str:
    return PAGES.get_template(template).render(version=bertrain.__version__, **values)


async def read_body(request: Request) -> bytes:
    """The body of a request. One that is too large is read on and dropped, so that the client reads our answer."""
    body, size = bytearray(), 0
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                size += len(part)
                if size <= MAX_BODY:
                    body += part
                elif size > 64 * MAX_BODY:
                    break
    except TimeoutError:
        raise UserError("slow-body", f"the body did not arrive within {BODY_S:.0f} s") from None
    if size > MAX_BODY:
        raise UserError("body-too-large", f"the body has more than {MAX_BODY:,} bytes; send fewer texts at once")
    return bytes(body)


def error_handlers() -> Any:
    """What a client is told of each kind of error."""
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect
    from starlette.responses import JSONResponse

    def told(status: int, code: str, message: str) -> Response:
        return JSONResponse({"error": {"code": code, "message": message}}, status)

    async def refuse(request: Request, error: UserError) -> Response:
        return told(STATUS.get(error.code, 422), error.code, str(error))

    async def refuse_address(request: Request, error: HTTPException) -> Response:
        texts = {404: ("unknown-path", f"there is nothing at {request.url.path}"), 405: ("wrong-method", "use POST")}
        return told(error.status_code, *texts.get(error.status_code, ("http-error", error.detail)))

    async def forget(request: Request, error: ClientDisconnect) -> Response:
        return told(400, "client-gone", "the client closed the connection")  # which nobody reads

    async def fail(request: Request, error: Exception) -> Response:
        return told(500, "internal-error", "the server failed; it has printed the traceback")

    return {UserError: refuse, HTTPException: refuse_address, ClientDisconnect: forget, Exception: fail}
