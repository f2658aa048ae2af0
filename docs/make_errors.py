"""Writes docs/errors.md: every error that a user can fix, by topic and code, with its cause and its fix.

usage: python docs/make_errors.py

Codes and sentences are read off the syntax tree of the package: every call of UserError and its subclasses. Values that
a sentence names at run time are shown as {name}. errors.toml explains codes whose sentence is not enough.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
PACKAGE = HERE.parent / "bertrain"
CODE = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
TOPICS = {
    "cli": "Command line and settings",
    "config": "Command line and settings",
    "base.units": "Command line and settings",
    "data.text": "Text",
    "data": "Prepared data",
    "pipeline": "Training",
    "training.fill_mask": "Fine-tuning and tasks",
    "training.finetuned": "Fine-tuning and tasks",
    "training.predict": "Fine-tuning and tasks",
    "training.task": "Fine-tuning and tasks",
    "training": "Training",
    "planning": "Training",
    "optim": "Training",
    "run": "Training",
    "tasks": "Fine-tuning and tasks",
    "weights": "Weights",
    "ranks.signals": "Training",
    "ranks": "This machine",
    "base": "This machine",
    "reports": "Reports and profiles",
    "profiling": "Reports and profiles",
    "serving": "Serving",
    "launch": "Clusters",
    "mlperf": "MLPerf",
}
"""The heading of an error by the beginning of its module; the first one counts."""


@dataclass(frozen=True)
class Raised:
    """One place where the package makes an error of a user."""

    module: str
    line: int
    code: str | None
    """None where it is not a literal in kebab-case."""
    sentence: str

    @property
    def place(self) -> str:
        return f"{self.module}:{self.line}"


def user_errors(trees: dict[str, ast.Module]) -> set[str]:
    """The names of UserError and its subclasses, wherever they are defined."""
    classes = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    names = {"UserError"}
    while True:
        found = {node.name for node in classes if names & {ast.unparse(base) for base in node.bases}}
        if found <= names:
            return names
        names |= found


def raised(package: Path = PACKAGE) -> list[Raised]:
    """Every call of UserError or a subclass in the package."""
    trees = {
        ".".join(path.relative_to(package.parent).with_suffix("").parts): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(package.rglob("*.py"))
    }
    names = user_errors(trees)
    return [
        _raised(module, node, _texts(tree, node.lineno))
        for module, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in names
        if not (node.args and ast.unparse(node.args[0]) == "error.code")  # another error, raised again
    ]


def _texts(tree: ast.Module, line: int) -> dict[str, ast.expr]:
    """The strings that the function around a line gives a name, each once: parts of a sentence."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    around = [node for node in functions if node.lineno <= line <= (node.end_lineno or 0)]
    found: dict[str, list[ast.expr]] = {}
    for node in ast.walk(max(around, key=lambda node: node.lineno)) if around else ():
        if isinstance(node, ast.Assign):
            found.setdefault(ast.unparse(node.targets[0]), []).append(node.value)
    once = {name: values[0] for name, values in found.items() if len(values) == 1}
    return {
        name: value
        for name, value in once.items()
        if isinstance(value, ast.JoinedStr) or (isinstance(value, ast.Constant) and isinstance(value.value, str))
    }


def _raised(module: str, call: ast.Call, texts: dict[str, ast.expr]) -> Raised:
    first, *others = call.args or [ast.Constant(None)]
    code = first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else None
    is_code = code is not None and CODE.fullmatch(code) is not None and len(others) == 1
    sentence = _template(others[0] if others else first, texts)
    return Raised(module, call.lineno, code if is_code else None, sentence)


def _template(node: ast.expr, texts: dict[str, ast.expr]) -> str:
    """The text of a string; holes of an f-string are shown as {name}, unless a string has that name."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_template(part, texts) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _template(node.left, texts) + _template(node.right, texts)
    if isinstance(node, ast.FormattedValue):
        if isinstance(node.value, ast.Name) and node.value.id in texts:
            return _template(texts[node.value.id], {})
        return f"{{{_hole(node.value)}}}"
    return f"{{{_hole(node)}}}"


def _hole(node: ast.expr) -> str:
    """A short name for a value: its last attribute or variable, or the first name in it."""
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):
        return node.slice.value
    names = [one.id for one in ast.walk(node) if isinstance(one, ast.Name)]
    return names[-1] if names else "..."


def errors() -> str:
    """The whole page."""
    return "\n".join(_page()) + "\n"


def causes() -> dict[str, str]:
    """Cause and fix by code, as errors.toml has them."""
    return tomllib.loads((HERE / "errors.toml").read_text(encoding="utf-8"))


def sentences(found: list[Raised]) -> dict[str, list[str]]:
    """The different sentences of each code."""
    by_code: dict[str, list[str]] = {}
    for one in found:
        by_code.setdefault(one.code or "-", []).append(one.sentence)
    return {code: sorted(set(texts)) for code, texts in by_code.items()}


def _page() -> Iterator[str]:
    yield from ("# Errors", "")
    yield "`python docs/make_errors.py` writes this page from the code and errors.toml; edit those, not this page."
    yield ""
    yield (
        "If you can fix an error, the command ends with exit code 2 and one line, `bertrain: message [code]`. The "
        "message names the file, the value and usually the fix. Look up its code here to learn more. Codes are stable, "
        "so that scripts can rely on them. If there is no more to say, the table repeats the message; {name} stands "
        "for a value, and *or:* separates several messages of one code."
    )
    found, written = raised(), causes()
    by_code = sentences(found)
    topics = {code: _topic([one.module for one in found if (one.code or "-") == code]) for code in by_code}
    for topic in dict.fromkeys(TOPICS.values()):
        yield from ("", f"## {topic}", "", "| code | cause and fix |", "|---|---|")
        for code in sorted(code for code in by_code if topics[code] == topic):
            text = written.get(code) or "; *or:* ".join(by_code[code])
            yield f"| `{code}` | {text.replace('|', chr(92) + '|')} |"


def _topic(modules: list[str]) -> str:
    """The topic of most of these modules."""
    topics = [TOPICS[next(name for name in TOPICS if module.startswith(f"bertrain.{name}"))] for module in modules]
    return max(topics, key=topics.count)


if __name__ == "__main__":
    (HERE / "errors.md").write_text(errors(), encoding="utf-8")
