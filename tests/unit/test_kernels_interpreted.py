"""The kernels in Triton's interpreter, on the CPU: the same code a GPU runs, on small cases.

Triton decides when it is imported whether kernels are compiled or interpreted, so one subprocess with
TRITON_INTERPRET=1 computes all cases and hands back its errors; each test looks at one of them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from importlib.metadata import version

import pytest


def why_not() -> str:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"

    def release(package: str) -> tuple[int, ...]:
        return tuple(int(part) for part in version(package).split("+")[0].split(".")[:2])

    if release("triton") < (3, 7) and release("numpy") >= (2, 4):
        return "the interpreter of triton < 3.7 does not work with numpy >= 2.4"
    return ""


pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

CASES = """
import json, warnings
warnings.filterwarnings("ignore")
import torch
from bertrain.kernels import attention, cross_entropy, gelu, lamb, layernorm
from bertrain.kernels.backend import available
from bertrain.kernels.random import rows_keep_mask

torch.manual_seed(0)
seed = torch.tensor([2**40 + 5])
errors = {"reason": available("cpu")[1]}

def distance(actual, expected):
    actual, expected = actual.detach().double(), expected.detach().double()
    return ((actual - expected).norm() / expected.norm()).item()

def compare(name, kernel, twin, inputs, extra):
    fast = [tensor.clone().requires_grad_() for tensor in inputs]
    plain = [tensor.double().requires_grad_() for tensor in inputs]
    y, z = kernel(*fast, *extra), twin(*plain, *extra)
    dy = torch.randn(y.shape)
    y.backward(dy)
    z.backward(dy.double())
    errors[name] = max([distance(y, z)] + [distance(a.grad, b.grad) for a, b in zip(fast, plain)])

lengths = [37, 1, 150, 16, 0, 64, 0]
cu_seqlens = torch.tensor([0] + lengths).cumsum(0).int()
for name, dropout_p, scale in (("attention", 0.0, 1), ("attention dropout", 0.1, 1), ("attention extreme", 0.1, 60)):
    qkv = torch.randn(sum(lengths), 3, 2, 32)
    qkv[:, 0] *= scale
    compare(
        name,
        lambda x, p=dropout_p: attention.ragged_attention(x, cu_seqlens, 512, p, seed, site=5),
        lambda x, p=dropout_p: attention.ragged_attention_plain(x, cu_seqlens, p, seed, site=5),
        [qkv], (),
    )
rows = [torch.randn(37, 96), torch.randn(96), torch.randn(37, 96), torch.randn(96), torch.randn(96)]
for name, p in (("layernorm", 0.0), ("layernorm dropout", 0.1)):
    compare(name, layernorm.dropout_add_layernorm, layernorm.dropout_add_layernorm_plain, rows, (p, seed, 2, 1e-12))
leaf = rows[0].clone().requires_grad_()
layernorm.dropout_add_layernorm(leaf, *rows[1:], 0.1, seed, 2).sum().backward()
errors["layernorm mask"] = float(((leaf.grad != 0) != rows_keep_mask(seed, 2, 37, 96, 0.1)).sum())
compare(
    "layernorm pair",
    lambda *args: sum(layernorm.dropout_add_layernorm_pair(*args)),
    lambda *args: 2 * layernorm.dropout_add_layernorm_plain(*args),
    rows, (0.1, seed, 2, 1e-12),
)
compare("gelu", gelu.bias_gelu, gelu.bias_gelu_plain, [3 * rows[0], rows[1]], ())

for width, vocab_size in ((104, 99), (2104, 2099)):
    labels = torch.randint(0, vocab_size, (13,))
    labels[3] = -100
    logits = torch.randn(13, width)
    logits[torch.arange(6), labels[:6].clamp(min=0)] += 9
    logits[8, 1] = 150.0
    fast, plain = logits.clone().requires_grad_(), logits.double().requires_grad_()
    loss, correct = cross_entropy.cross_entropy(fast * 1, labels, vocab_size, 1 / 12)
    expected, expected_correct = cross_entropy.cross_entropy_plain(plain, labels, vocab_size, 1 / 12)
    (2 * loss).backward()
    (2 * expected).backward()
    errors[f"cross entropy {width}"] = max(distance(loss, expected), distance(fast.grad, plain.grad))
    errors[f"cross entropy {width} count"] = abs(correct - expected_correct).item()

offsets = [0, 1000, 1003, 5000, 5000 + 4096]
flags = [(True, True), (False, False), (True, True), (True, False)]
state = [torch.randn(offsets[-1]), torch.randn(offsets[-1]), torch.rand(offsets[-1]), torch.rand(offsets[-1])]
fast, plain = [t.clone() for t in state], [t.double() for t in state]
table = lamb.LambTable.build(offsets, flags, device="cpu")
scalars = [torch.tensor([v]) for v in (0.01, 0.5, 1.0, 3.0)]
copy = torch.empty(offsets[-1], dtype=torch.bfloat16)
lamb.lamb_step(*fast, table, *scalars, weight_decay=0.01, copy=copy)
lamb.lamb_step_plain(*plain, table, *scalars, weight_decay=0.01)
errors["lamb"] = max(distance(a, b) for a, b in zip(fast, plain))
errors["lamb copy"] = distance(copy, fast[0])  # the interpreter rounds to bf16 by cutting
scalars[2].zero_()
before = [t.clone() for t in fast]
lamb.lamb_step(*fast, table, *scalars, weight_decay=0.01, copy=copy)
errors["lamb untouched"] = float(sum((a != b).sum() for a, b in zip(fast, before)))
print(json.dumps(errors))
"""

BOUNDS = {
    "attention": 2e-6, "attention dropout": 2e-6, "attention extreme": 5e-5, "layernorm": 2e-6,
    "layernorm dropout": 2e-6, "layernorm mask": 0, "layernorm pair": 2e-6, "gelu": 2e-6, "cross entropy 104": 2e-6,
    "cross entropy 104 count": 0, "cross entropy 2104": 2e-6, "cross entropy 2104 count": 0, "lamb": 2e-6,
    "lamb copy": 1e-2, "lamb untouched": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def errors() -> dict:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([os.getcwd(), environment.get("PYTHONPATH", "")])
    run = subprocess.run([sys.executable, "-c", CASES], env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


def test_interpreter_runs_the_kernels(errors):
    assert "interpreter" in errors["reason"]


@pytest.mark.parametrize("case", BOUNDS)
def test_kernel_matches_twin(errors, case):
    assert errors[case] <= BOUNDS[case]
