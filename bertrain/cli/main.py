"""The command line: joins the commands of this folder, and turns errors into exit codes.

Each command calls one Python function. Nothing heavy is imported before a command needs it, so that --help answers at
once.
"""

from __future__ import annotations

import errno
import io
import os
import platform
import signal
import sys
from typing import Annotated, Any

import typer
from typer import Option

from bertrain import __version__
from bertrain.base import errors
from bertrain.base.files import is_valid_text
from bertrain.base.machine import is_first_rank, under_launcher
from bertrain.cli import about, data, launch, mlperf, plan, profile, reports, serve, tasks, train, weights
from bertrain.cli.options import brief_help, new_app, refuse_misspelled
from bertrain.cli.pipeline import pipeline_app
from bertrain.ranks.signals import INTERRUPTS, end_with_launcher, note_interrupt

# Commands that keep what they have done when they are interrupted.
CONTINUES = ("train", "data prepare", "data download", "data mlperf", "mlperf run", "embed", "sweep", "finetune")
NO_MEMORY = ("failed to map segment", "cannot allocate memory", "can't start new thread", "bad_alloc")
UsageError: Any = typer.BadParameter.__base__  # click's class, which typer does not export in every version

app = new_app(
    help="Train BERT: data, pre-training, fine-tuning, evaluation, weights. `bertrain help COMMAND` explains one.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 1000},  # that of the terminal
    pretty_exceptions_enable=False,
)
app.add_typer(pipeline_app)
for commands in (train, tasks, serve, reports, about, data, weights, mlperf, plan, profile, launch):
    app.add_typer(commands.app)


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, Option("--version", help="print the version and exit")] = False) -> None:
    if version:
        print(__version__)
        raise typer.Exit


def main() -> None:
    """Run the command line; base/errors.py has the exit codes."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where a shell has it ignored
        signal.signal(signal.SIGINT, note_interrupt)
    end_with_launcher()
    try:
        _run()
    except SystemExit as ended:
        try:
            sys.stdout.flush()
        except OSError:  # a full disk or a closed pipe, which Python would report again while it shuts down
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = ended.code or 0
        if not under_launcher() or not isinstance(code, int):
            raise
        # gloo's threads may still release tensors, which needs the interpreter. While it shuts down they abort (torch
        # 2.13: 5 of some 80 runs on busy cores), and the exit code would be lost.
        sys.stderr.flush()
        os._exit(code)


def _run() -> None:
    # Threads that spin while they wait take cores from other processes: beside another busy process on two cores,
    # training ran at 6,000 tokens/s spinning and 21,000 sleeping; alone, at 24,000 and 21,000.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    words = sys.argv[1:]
    if words[:1] == ["help"]:
        sys.argv[1:] = words = [*words[1:], "--help"]
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names may have letters that the locale lacks
    try:
        if (system := platform.system()) != "Linux":
            raise errors.UserError("unsupported-system", f"bertrain runs on Linux (also in WSL), not on {system}")
        _check_names(words)
        code = _call_command(words)
        sys.stdout.flush()
    except BrokenPipeError:  # as Typer does for the output of a command: `bertrain | head`
        raise SystemExit(1) from None
    except errors.UserError as error:
        is_reported_here = not isinstance(error, errors.AgreedError) or is_first_rank()
        if is_reported_here and not isinstance(error, errors.ReportedElsewhereError):
            print(f"bertrain: {error} [{error.code}]", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    except errors.LostRankError as error:
        print(f"bertrain: {error}", file=sys.stderr)
        raise SystemExit(errors.EXIT_LOST_RANK) from None
    except KeyboardInterrupt:
        code = errors.EXIT_INTERRUPTED
    except Exception as error:
        if not INTERRUPTS:  # an import that is interrupted may fail in its own way
            if (found := _as_user_error(error)) is None:
                raise
            print(f"bertrain: {found} [{found.code}]", file=sys.stderr)
            raise SystemExit(errors.EXIT_USER_ERROR) from None
        code = errors.EXIT_INTERRUPTED
    if code == errors.EXIT_INTERRUPTED:  # typer catches the interrupt in some versions
        is_kept = " ".join([*sys.argv[1:3], ""]).startswith(tuple(f"{command} " for command in CONTINUES))
        what = "; the same command continues where it stopped" if is_kept else ""
        print(f"bertrain: interrupted{what}", file=sys.stderr)
        raise SystemExit(errors.EXIT_INTERRUPTED)
    raise SystemExit(code)


def _check_names(words: list[str]) -> None:
    """Refuse paths that neither libraries nor files of text can hold, before anything is written under them."""
    try:
        here = os.getcwd()
    except FileNotFoundError:
        raise errors.UserError(
            "no-working-directory", "the working directory was removed; change into one that exists"
        ) from None
    for name in (*words, here):
        if not is_valid_text(name):
            raise errors.UserError("name-not-utf8", f"the name {name} is not UTF-8; rename it")


def _as_user_error(error: Exception) -> errors.UserError | None:
    """What the user can fix, wherever it was met, such as in an import: a limit, or a name; None for another error."""
    number, text = getattr(error, "errno", None), str(error).lower()
    if isinstance(error, MemoryError) or number == errno.ENOMEM or any(words in text for words in NO_MEMORY):
        cure = "free some memory, or raise the limit (`ulimit -v`, or that of the job)"
        return errors.UserError(
            "out-of-host-memory", f"out of memory on this machine, or a memory limit was reached; {cure}"
        )
    if number in (errno.EMFILE, errno.ENFILE) or "too many open files" in text:
        cure = "raise the limit (`ulimit -n`) and start the same command again"
        return errors.UserError("too-many-files", f"the limit on open files was reached; {cure}")
    if number in (errno.ENOSPC, errno.EDQUOT):
        what = getattr(error, "filename", None) or "the output"
        cure = "free some space, then run the same command again"
        return errors.UserError("unwritable-file", f"cannot write {what}: {os.strerror(number)}; {cure}")
    if isinstance(error, UnicodeEncodeError) and not is_valid_text(error.object):  # of a file in a folder, mostly
        shown = error.object[max(0, error.start - 60) : error.end + 20]
        return errors.UserError("name-not-utf8", f"the name or text {shown} is not UTF-8; rename it, or leave it out")
    return None


def _call_command(words: list[str]) -> Any:
    try:
        return app(prog_name="bertrain", standalone_mode=False)
    except UsageError as error:
        message, context = error.format_message(), error.ctx
        if message.startswith("Usage:"):  # no command was given: the message is the help text
            print(message)
            return 0
        if context is not None:
            if words[:1] == ["launch"] and "--" in words:  # the error is of `launch`, or of the command behind it
                at = words.index("--")
                words = words[:at] if context.command_path.startswith("bertrain launch") else words[at + 1 :]
            if not hasattr(context.command, "commands") or words[0].startswith("-"):
                refuse_misspelled(context.command, words)  # the options of a misspelled command are not known
            if words == context.command_path.split()[1:]:  # a command without its arguments
                print(brief_help(context), flush=True)
        message = message.rstrip(".").replace("\n\t", " ").replace("Value error, ", "")  # typer lists choices in lines
        see = f"`{context.command_path if context else 'bertrain'} --help`"
        end = f" See {see}" if message.endswith("?") else f"; see {see}"
        raise errors.UserError("usage", f"{message[:1].lower()}{message[1:]}{end}") from None
