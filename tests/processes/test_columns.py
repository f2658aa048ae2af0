"""What `train` and `pretrain` print fits into 100 columns, on a terminal and in a pipe."""

from __future__ import annotations

import fcntl
import os
import pty
import random
import re
import struct
import subprocess
import termios
from pathlib import Path

from bertrain.base.formatting import COLUMNS, wrap
from bertrain.training.start import pretrain
from tests import helpers

CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
COMMAND = re.compile(r"(use: +from transformers|next: +bertrain|  `)")  # to be copied as they are
SETTINGS = {"log.trackers": "none", "train.max_steps": 3}


def printed(arguments: list[object], *, on_terminal: bool) -> list[str]:
    """The lines of a command on a terminal of 100 columns, or in a pipe, without what moves the cursor."""
    if not on_terminal:
        command = helpers.command(*arguments)
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=helpers.environment(), check=False
        )
        assert done.returncode == 0, done.stdout.decode()
        return done.stdout.decode().split("\n")
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
    environment = helpers.environment() | {"TERM": "xterm"}
    with subprocess.Popen(helpers.command(*arguments), stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        content = b""
        while True:
            try:
                part = os.read(ours, 1 << 16)
            except OSError:  # Linux's way of saying that the other end is closed
                break
            if not part:
                break
            content += part
    os.close(ours)
    assert process.returncode == 0, content.decode()
    return re.split(r"[\r\n]+", CONTROL.sub("", content.decode()))


def check_widths(lines: list[str]) -> None:
    for line in lines:
        is_path = len(line.split()) == 1 and "/" in line
        assert len(line) <= COLUMNS or is_path or COMMAND.match(line), line


def write_text(folder: Path) -> Path:
    """Documents of a sentence each: `train` warns of that."""
    folder.mkdir(parents=True)
    draw = random.Random(0)
    sentences = (" ".join(draw.choices(helpers.vocabulary_words(), k=12)).capitalize() for _ in range(4000))
    (folder / "all.txt").write_text("".join(f"{sentence}.\n\n" for sentence in sentences))
    return folder


def test_lines_of_train_and_pretrain_fit(tmp_path: Path) -> None:
    deep = tmp_path / ("a-folder-with-a-long-name-" * 3)
    text, base = write_text(deep / "text"), deep / "base"
    settings = helpers.tiny_settings(train__max_steps=1, log__level="quiet")
    data = helpers.make_data(tmp_path)
    pretrain(settings, data, base)
    given = [word for key, value in SETTINGS.items() for word in (f"--{key}", value)]
    reading = ["--document-end", "blank-line", "--data.max_seq_length", 32]
    lines = printed(["train", text, "--out", deep / "out", "--init", base, *reading, *given], on_terminal=True)
    assert any("warning: a document has only" in line for line in lines), lines
    assert any(line.startswith("from the weights of --init: ") for line in lines), lines
    check_widths(lines)
    again = ["pretrain", "bert-tiny", "--data", data, "--run", deep / "piped", "--init", base, *given]
    again += ["--data.max_seq_length", 64]
    lines = printed(again, on_terminal=False)
    assert any(line.startswith("from the weights of --init: ") for line in lines), lines
    check_widths(lines)
    assert any(len(line) > COLUMNS - 20 for line in lines), "something was wrapped"


def test_wrapping_keeps_words_paths_and_commands() -> None:
    path, command = "/" + "x" * 120, "`bertrain finetune classify --init weights --data labels.csv --run runs/labels`"
    said = wrap(f"warning: {'word ' * 30}{path}; use {command}, or not")
    assert all(len(line) <= COLUMNS or line.strip() == f"{path};" for line in said.split("\n"))
    assert sum(command in line for line in said.split("\n")) == 1
    assert all(line.startswith("  ") for line in said.split("\n")[1:])
    assert helpers.unwrapped(said) == f"warning: {'word ' * 30}{path}; use {command}, or not"
    assert wrap(f"  a  {'b' * 90}\nshort") == f"  a  {'b' * 90}\nshort"
