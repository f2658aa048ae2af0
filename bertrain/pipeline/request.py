"""The request of `bertrain train`, checked before anything is read or written."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bertrain.base.errors import UserError
from bertrain.base.files import HUB_PREFIX, absolute, existing_parent, is_writable
from bertrain.base.units import parse_duration
from bertrain.config.choices import DocumentEnd, OnError, Size
from bertrain.config.resolve import absolute_overrides, resolve
from bertrain.data.text.languages import check_language
from bertrain.pipeline.plan import HELD_OUT

TASKS = ("classify",)
OF_BOTH = tuple(
    f"train.{name}"
    for name in (
        "device", "precision", "kernels", "isa", "threads", "binding", "allocator", "openmp", "backend",
        "deterministic", "seed", "hang_timeout",
    )
)  # fmt: skip
"""Settings that apply to pre-training and to the fine-tuning after it."""


@dataclass(frozen=True)
class Request:
    """The user's arguments, kept in OUT: a command with the same arguments continues, another one is refused."""

    inputs: tuple[str, ...]
    budget: str
    evaluation_share: float
    cased: bool
    language: str
    init: str
    size: Size
    task: str
    text_column: str
    encoding: str
    document_end: DocumentEnd
    on_error: OnError
    overrides: tuple[tuple[str, str], ...]

    @property
    def reading(self) -> dict[str, Any]:
        """How to read the text, as `extract` and `estimate` take it."""
        names = ("text_column", "encoding", "document_end", "language", "on_error")
        return {name: getattr(self, name) for name in names}

    def settings(self, *, of_task: bool) -> dict[str, str]:
        """The user's settings for fine-tuning, or for pre-training; those in OF_BOTH and `log` are for both."""
        return {
            key: value
            for key, value in self.overrides
            if key.startswith("task.") == of_task or (of_task and (key.startswith("log.") or key in OF_BOTH))
        }


def make_request(given: dict[str, Any]) -> Request:
    """The arguments of `train`, checked; paths are absolute, so that the command may be repeated from elsewhere."""
    values = {name: value for name, value in given.items() if name not in ("out", "nproc")}
    inputs = values["inputs"]
    paths = [inputs] if isinstance(inputs, str | Path) else list(inputs)
    values["inputs"] = tuple(str(Path(path).resolve()) for path in paths)
    values["init"] = absolute(values["init"])
    values["overrides"] = tuple(absolute_overrides(values["overrides"]).items())
    request = Request(**values)
    if not 0 < request.evaluation_share < 1:
        share = f"--eval is {request.evaluation_share:g}"
        raise UserError("option-out-of-range", f"{share}; give a share above 0 and below 1, such as 0.05 or 5%")
    if not parse_duration(request.budget, "--budget"):
        raise UserError("invalid-duration", "--budget is empty; give a time such as 30m")
    if request.task:
        kind, _, file = request.task.partition("=")
        if kind not in TASKS or not file:
            raise UserError("bad-task", f"--task is {request.task!r}; use classify=FILE with a text and a label column")
        if not Path(file).exists():
            raise UserError("missing-data", f"--task {request.task}: there is no file {file}")
        request = replace(request, task=f"{kind}={Path(file).resolve()}")
    if request.init and request.size != "auto":
        raise UserError(
            "conflicting-options", "--size and --init exclude each other, since weights have a size; give one"
        )
    return request


def check_request(request: Request, out: Path) -> None:
    """Refuse, before anything is written, what a later stage would refuse: settings, weights and the task's table."""
    from bertrain.data.text.vocabulary import SPECIAL_WORDS, Vocabulary
    from bertrain.tasks.registry import open_task
    from bertrain.training.task_settings import resolve_task
    from bertrain.weights.source import open_source

    check_language(request.language)
    place = out.resolve()
    for path in map(Path, request.inputs):
        if path in (place, *place.parents):
            raise UserError(
                "output-in-input", f"--out {out} is inside the text folder {path}; choose a folder outside it"
            )
    if not is_writable(existing_parent(place)):
        raise UserError("unwritable-folder", f"cannot write {out}; choose another --out")
    given = request.settings(of_task=False)
    if "evaluate.data" in given:
        cure = "leave evaluate.data out; --eval sets how much"
        raise UserError("conflicting-options", f"`train` evaluates on text that it holds out; {cure}")
    if given.get("data.generator") and not request.init:
        cure = "use `pretrain`, on data prepared with the generator's vocab.txt"
        raise UserError("conflicting-options", f"`train` makes a vocabulary, but data.generator has its own; {cure}")
    recipe = "bert-tiny" if request.size == "auto" else f"bert-{request.size}"
    settings = resolve(recipe, given | {"evaluate.data": str(out / HELD_OUT)})
    if "train.epochs" in dict(request.overrides) and not settings.train.epochs:
        raise UserError("no-length", "train.epochs is 0, so there is nothing to train; give more, or leave it out")
    if request.init and not request.init.startswith(HUB_PREFIX):
        open_source(request.init, hashes=False)
    if request.task:
        kind, _, file = request.task.partition("=")
        of_task = resolve_task(kind, request.settings(of_task=True))
        task = open_task(of_task, Path(file), Vocabulary(SPECIAL_WORDS, lower_case=not request.cased))
        task.training()
        task.held_out()
