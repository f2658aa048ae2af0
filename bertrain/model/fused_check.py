"""Checks that a model is the one that the fused path implements, so that a changed bert.py never trains the old model.

fused*.py compute `bert.py` and `modern.py` by hand and would ignore a change of these. So the sources that they were
written for are recorded here, as hashes of their syntax trees: without comments, docstrings, annotations and
formatting. A model is accepted if the code of its classes and of the functions they call has these hashes, and if its
modules are those of a new model of its settings: no subclass, no module added or replaced, no attribute or `forward`
changed, no hook.

After a change of bert.py, modern.py, encoder.py or heads.py: change fused*.py to match, run
tests/numerics/test_kernels_interpreted.py, and tests/gpu/test_fused.py and test_modern.py on a GPU; once they pass,
copy the `fingerprints` of the family to `WRITTEN_FOR`.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import textwrap
from types import FunctionType, ModuleType
from typing import Any

from torch import nn

from bertrain.model import attention, bert, encoder, heads, modern, pooling
from bertrain.model.encoder import EncoderModel
from bertrain.model.initialization import uninitialized

CLASSES = {
    "bert": (
        encoder.EncoderModel, bert.Embeddings, bert.Layer, bert.Bert, heads.MaskedWordHead, heads.ReplacedWordHead,
        heads.SentenceHead, heads.SpanHead, heads.TagHead, pooling.PoolingHead,
    ),
    "modern": (
        encoder.EncoderModel, modern.Embeddings, modern.Layer, modern.Modern, modern.MaskedWordHead,
        pooling.PoolingHead,
    ),
}  # fmt: skip
OF_PYTORCH = (nn.Embedding, nn.LayerNorm, nn.Linear, nn.ModuleList, nn.Identity)
FUNCTIONS: dict[str, dict[ModuleType, tuple[str, ...]]] = {
    "bert": {bert: ("dropout", "answer_head"), attention: ("attend_grouped", "_attend")},
    "modern": {
        modern: ("dropout", "waves_at", "rotate", "_norm"),
        attention: ("attend_grouped", "_attend", "_attend_nearby"),
    },
}  # functions that the classes call; found at each check, so that a replaced one is noticed
FUNCTIONS_OF_BOTH = {
    heads: ("pretraining_sums", "_replaced_sums", "answer_sums", "by_sequence", "_cross_entropy"),
    pooling: ("pool", "sequence_of_token", "_sums"),
}
WRITTEN_FOR: dict[str, dict[str, str]] = {
    "bert": {
        "EncoderModel.__init__": "69a40fae615e8d3c",
        "EncoderModel.encode": "fcb3cc3682d2bf97",
        "EncoderModel.forward": "1b2e147a78a12d3a",
        "EncoderModel.sentences": "0cd1c4019720c623",
        "Embeddings.__init__": "7c2330dbec21fe86",
        "Embeddings.forward": "ec6f30094ad5aff7",
        "Layer.__init__": "180795a838e8ecad",
        "Layer.forward": "b01e4bcf588d6ffd",
        "Bert.__init__": "a33cca6241cb90c3",
        "Bert.encode": "e3c1edb3419fa605",
        "MaskedWordHead.__init__": "680618bf32dcc2bc",
        "MaskedWordHead.forward": "fbe895aac92a9a6c",
        "ReplacedWordHead.__init__": "58d55e35f001bfee",
        "ReplacedWordHead.forward": "69c7127d98f5266b",
        "SentenceHead.__init__": "5b60ba410faedd35",
        "SentenceHead.forward": "e60a89bb40382271",
        "SpanHead.__init__": "df4f84d2c732c24a",
        "SpanHead.forward": "9e4c3f21a3dc864e",
        "TagHead.__init__": "a08cc03f5a57af27",
        "TagHead.forward": "9feedc74fd5576c1",
        "PoolingHead.__init__": "c7c0357817b9f4bc",
        "PoolingHead.forward": "9b0690604b9d8ee0",
        "dropout": "f1cea0e8262eebe6",
        "answer_head": "bb3d45f906866035",
        "attend_grouped": "89f7201492117525",
        "_attend": "fa92e13139b527aa",
        "pretraining_sums": "b6abd7296316463d",
        "_replaced_sums": "685a96c252320bc0",
        "answer_sums": "10ecb097c153c278",
        "by_sequence": "8adcc9a3363549d0",
        "_cross_entropy": "b559518ae02b6b37",
        "pool": "cbd0a173fb39b415",
        "sequence_of_token": "3ae6c576f3e02046",
        "_sums": "1c268ee89b804930",
    },
    "modern": {
        "EncoderModel.__init__": "69a40fae615e8d3c",
        "EncoderModel.encode": "fcb3cc3682d2bf97",
        "EncoderModel.forward": "1b2e147a78a12d3a",
        "EncoderModel.sentences": "0cd1c4019720c623",
        "Embeddings.__init__": "4442e1eb2596053b",
        "Embeddings.forward": "f11fd3887c46ce42",
        "Layer.__init__": "a4b89f69ec66fbe5",
        "Layer.forward": "e7c99ce569d3fea9",
        "Modern.__init__": "d61290c4a20147df",
        "Modern.encode": "6343935d93eef1df",
        "Modern.sentences": "17def2468be304d0",
        "MaskedWordHead.__init__": "8dc0a42e9e034cfc",
        "MaskedWordHead.forward": "398d55f268767460",
        "PoolingHead.__init__": "c7c0357817b9f4bc",
        "PoolingHead.forward": "9b0690604b9d8ee0",
        "dropout": "f1cea0e8262eebe6",
        "waves_at": "7683c452e2705786",
        "rotate": "0b72db6ed4c8764e",
        "_norm": "32c74d22bb9e6eb1",
        "attend_grouped": "89f7201492117525",
        "_attend": "fa92e13139b527aa",
        "_attend_nearby": "745aa5ef65ad01e3",
        "pretraining_sums": "b6abd7296316463d",
        "_replaced_sums": "685a96c252320bc0",
        "answer_sums": "10ecb097c153c278",
        "by_sequence": "8adcc9a3363549d0",
        "_cross_entropy": "b559518ae02b6b37",
        "pool": "cbd0a173fb39b415",
        "sequence_of_token": "3ae6c576f3e02046",
        "_sums": "1c268ee89b804930",
    },
}
NOT_SYNTAX = {"annotation", "returns", "type_comment", "type_params", "kind", "ctx"}


def why_not_implemented(model: EncoderModel) -> str:
    """The first difference between `model` and the one that the fused path implements; empty if there is none."""
    family = model.settings.family
    current, written_for = fingerprints(family), WRITTEN_FOR[family]
    for name in sorted(current.keys() | written_for.keys()):
        if current.get(name) != written_for.get(name):
            return f"the source of {name} is not the one that model/fused_{family}.py was written for"
    reference, classes = uninitialized(model.settings), (*CLASSES[family], *OF_PYTORCH)
    expected, found = dict(reference.named_modules()), dict(model.named_modules())
    for name in sorted(expected.keys() | found.keys()):
        if difference := _difference(found.get(name), expected.get(name), classes):
            return f"{f'its module {name}' if name else 'it'} {difference}"
    shapes = ({name: tensor.shape for name, tensor in one.named_parameters()} for one in (model, reference))
    return "" if next(shapes) == next(shapes) else "its parameters have other names or shapes"


def fingerprints(family: str) -> dict[str, str]:
    """Hashes of the sources that the fused path depends on, as they are now, by the names of `WRITTEN_FOR`."""
    methods = {
        f"{kind.__name__}.{name}": member
        for kind in CLASSES[family]
        for name, member in sorted(vars(kind).items())
        if callable(member)
    }
    called = FUNCTIONS[family] | FUNCTIONS_OF_BOTH
    functions = {name: getattr(module, name) for module, names in called.items() for name in names}
    return {name: _fingerprint(function) for name, function in (methods | functions).items()}


def _fingerprint(function: Any) -> str:
    if not isinstance(function, FunctionType):
        return "not a function"
    try:
        source = inspect.getsource(function.__code__)  # not of the function: that would follow `__wrapped__`
        tree = ast.parse(textwrap.dedent(source)).body[0]
    except (OSError, SyntaxError):
        return "no source"
    return hashlib.sha256(repr(_syntax(tree)).encode()).hexdigest()[:16]


def _syntax(node: Any) -> Any:
    """A syntax tree as nested tuples, the same in all versions of Python."""
    if isinstance(node, list):
        return tuple(_syntax(item) for item in node if not _is_docstring(item))
    if not isinstance(node, ast.AST):
        return node
    fields = ((name, _syntax(value)) for name, value in ast.iter_fields(node) if name not in NOT_SYNTAX)
    return type(node).__name__, tuple(pair for pair in fields if pair[1] not in (None, ()))


def _is_docstring(node: Any) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _difference(found: nn.Module | None, expected: nn.Module | None, classes: tuple[type, ...]) -> str:
    """How a module differs from the one of the same name in a new model; empty if it does not."""
    if found is None:
        return "is missing"
    if expected is None:
        return "was added"
    if type(found) is not type(expected) or type(found) not in classes:
        return f"is of the class {type(found).__module__}.{type(found).__qualname__}"
    if found._forward_hooks or found._forward_pre_hooks or found._backward_hooks or found._backward_pre_hooks:
        return "has a hook"
    own, reference = _attributes(found), _attributes(expected)
    changed = [name for name in own.keys() | reference.keys() if own.get(name) != reference.get(name)]
    return f"has another {min(changed)}" if changed else ""


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if not name.startswith("_") and name != "training"}
