"""The verb that serves models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from bertrain.cli import options

app = options.new_app()

Host = Annotated[str, Option("--host", help="address to listen on; 0.0.0.0: all, for anybody who reaches this machine")]


@app.command("serve", context_settings=options.OVERRIDES)
@options.takes_settings()
def serve(
    sources: Annotated[list[Path], Argument(metavar="RUN_OR_WEIGHTS...", help=options.KNOWN_WEIGHTS)],
    overrides: options.Overrides,
    host: Host = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="0: any that is free")] = 8000,
    checkpoint: options.Checkpoint = "newest",
    device: Annotated[options.Device, Option(help="auto: a GPU if there is one")] = "auto",
) -> None:
    """Serve models over HTTP: for each a web page to try it, and the same as a JSON API, described at /docs.

    A pre-trained model fills masks; a fine-tuned one does what its head is for; other encoders compare texts. It
    listens on this machine alone, without passwords. SIGTERM and Ctrl-C finish the requests in flight.

    As in `bertrain predict`, --section.field VALUE says what fine-tuned weights do not: --task.name squad/v2.0 if
    questions may have no answer, --task.text_pair NAME if they read pairs of texts.

    Example: bertrain serve runs/letters runs/tiny --port 8000
    """
    from bertrain.serving.server import serve as serve_models

    serve_models(sources, host=host, port=port, which=checkpoint, device=device, overrides=overrides)
