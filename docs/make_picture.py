"""A recorded terminal session as a picture.

    script -qec "make demo" demo.typescript
    python docs/make_picture.py demo.typescript docs/demo.svg --title "make demo"

What a live bar wrote over is gone, as on the screen; colors stay.
"""

from __future__ import annotations

import argparse
import io
import re
from pathlib import Path

from rich.console import Console
from rich.text import Text

SEQUENCE = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|\x1b\][^\x07]*\x07|\r|\n|[^\x1b\r\n]+")


def screen_of(recording: str) -> list[str]:
    """The lines that stand on the screen at the end. Covers what rich writes: colors, one line up, erase a line."""
    lines = [""]
    row = 0
    for found in SEQUENCE.finditer(recording):
        token, letter = found.group(), found.group(2)
        if token == "\n":
            row += 1
            if row == len(lines):
                lines.append("")
        elif letter == "A":
            row = max(0, row - int(found.group(1) or 1))
        elif letter == "K":
            lines[row] = ""
        elif letter == "m" or (letter is None and not token.startswith(("\x1b", "\r"))):
            lines[row] += token
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recording", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--title", default="")
    parser.add_argument("--width", type=int, default=102)
    arguments = parser.parse_args()
    recording = arguments.recording.read_bytes().decode(errors="replace")  # as it is: text mode would turn \r into \n
    lines = [line for line in screen_of(recording) if "Script " not in line]
    console = Console(record=True, width=arguments.width, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi("\n".join(lines).strip("\n")), soft_wrap=False)
    console.save_svg(str(arguments.picture), title=arguments.title)


if __name__ == "__main__":
    main()
