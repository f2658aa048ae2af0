"""The command that serves models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from bertrain.cli import options

app = options.new_app()

Host = Annotated[
    str, Option("--host", help="address to listen on; 0.0.0.0: all, open to anybody who can reach this machine")
]


@app.command("serve", context_settings=options.OVERRIDES)
@options.takes_settings()
def serve(
    sources: Annotated[list[Path], Argument(metavar="RUN_OR_WEIGHTS...", help=options.KNOWN_WEIGHTS)],
    overrides: options.Overrides,
    host: Host = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="port to listen on; 0: any free one")] = 8000,
    checkpoint: options.Checkpoint = "newest",
    device: options.Device = "auto",
) -> None:
    """Serve models over HTTP: a web page to try each of them, and a JSON API, described at /docs.

    A pre-trained model fills masks, a fine-tuned one does its task, and other encoders compare texts. There is no
    password; by default only this machine can connect. SIGTERM and Ctrl-C finish the requests in flight first.

    As in `bertrain predict`, --section.field VALUE adds what fine-tuned weights do not define: --task.name squad/v2.0
    if questions may have no answer, --task.text_pair NAME if the model reads pairs of texts.

    Example: bertrain serve runs/letters runs/tiny --port 8000
    """
    from bertrain.serving.server import serve as serve_models

    serve_models(sources, host=host, port=port, which=checkpoint, device=device, overrides=overrides)
