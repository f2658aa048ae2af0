"""Checks that the fused path implements the present source of the models.

fused*.py compute `bert.py` and `modern.py` by hand. After a change of these files alone, a run would silently train the
old model. So this file has the hash of the sources that fused*.py implement.

After a change of one of them: change fused*.py to match, run tests/numerics/test_kernels_interpreted.py, and
tests/gpu/test_fused.py and test_modern.py on a GPU. Once they pass, copy the new `fingerprint` to `WRITTEN_FOR`.
"""

from __future__ import annotations

import ast
import functools
import hashlib
from pathlib import Path

SPECIFICATION = ("attention.py", "bert.py", "dropout.py", "encoder.py", "heads.py", "modern.py", "pooling.py")
WRITTEN_FOR = "a77cf17328f76095"


@functools.cache
def why_outdated() -> str:
    """Why the fused path may compute another model than `SPECIFICATION`; empty if it computes that one."""
    try:
        found = fingerprint(Path(__file__).parent)
    except OSError as error:  # only compiled files, or a zip file
        return f"the source of the models cannot be read: {error}"
    if found == WRITTEN_FOR:
        return ""
    return "the source of the models is not the one that model/fused*.py were written for"


def fingerprint(folder: Path) -> str:
    """A hash of the specification in this folder, without comments, docstrings and formatting."""
    syntax = [_syntax((folder / name).read_text("utf-8")) for name in SPECIFICATION]
    return hashlib.sha256("\0".join(syntax).encode()).hexdigest()[:16]


def _syntax(source: str) -> str:
    """The source as Python writes its syntax tree: the same in 3.11 to 3.13, where a dump of the tree is not."""
    return ast.unparse(_WithoutDocstrings().visit(ast.parse(source)))


class _WithoutDocstrings(ast.NodeTransformer):
    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        is_docstring = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return None if is_docstring else node
