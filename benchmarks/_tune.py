import torch, statistics, itertools
from bertrain.kernels import fp8, gelu, layernorm
from gpu_kernels import median_us, normal

T = 24576
seed = torch.tensor([1], device="cuda")
big = torch.zeros(400000, device="cuda")
one = torch.ones(1, device="cuda")
c4 = fp8.Cast(torch.float8_e4m3fn, one, big)
c5 = fp8.Cast(torch.float8_e5m2, one, big)


def tell(name, f):
    try:
        print(f"{name:50s}{median_us(f):9.1f} us", flush=True)
    except Exception as e:
        print(name, "FAILED", str(e)[:100], flush=True)


x, b, r, w, l = normal(T, 1024), normal(1024), normal(T, 1024), normal(1024), normal(1024)
tell("ln fwd", lambda: layernorm.dropout_add_layernorm_forward(x, b, r, w, l, 0.1, seed, 1, 1e-12))
for v, c in ((normal(512, 1024) * 100, c4), (normal(512, 1024) * 9000, c5)):
    e, _ = fp8.cast_both_ways(v, c)
    ref = fp8.cast_plain(v, one, c.dtype)
    print(
        "cast equal",
        torch.equal(e.rows.view(torch.uint8), ref.view(torch.uint8)),
        torch.equal(e.columns.view(torch.uint8), ref.t().contiguous().view(torch.uint8)),
    )
y, st = layernorm.dropout_add_layernorm_forward(x, b, r, w, l, 0.1, seed, 1, 1e-12)
dy, d2 = normal(T, 1024), normal(T, 1024)
tell("ln bwd", lambda: layernorm.dropout_add_layernorm_backward(dy, d2, x, b, r, w, st, 0.1, seed, 1))
for wd in (1024, 3072):
    v = normal(T, wd)
    for cfg in ((64, 64, 4, 16), (128, 64, 4, 4), (128, 64, 4, 8), (64, 64, 4, 8), (64, 128, 8, 8)):
        fp8.CAST = cfg
        tell(f"cast {wd} {cfg}", lambda: fp8.cast_both_ways(v, c5))
        tell(f"cast sums {wd} {cfg}", lambda: fp8.cast_both_ways(v, c5, sums=True))
    tell(f"cast {wd} sums {cfg}", lambda: fp8.cast_both_ways(v, c5, sums=True))
    tell(f"torch sum {wd}", lambda: v.sum(0, dtype=torch.float32))
x, b = normal(T, 4096), normal(4096)
dy = normal(T, 4096)
tell("gelu fwd", lambda: gelu.bias_gelu_forward(x, b))
for cfg in (
    (64, 64, 4, 4),
    (64, 64, 4, 8),
    (64, 64, 4, 16),
    (32, 64, 4, 16),
    (128, 64, 8, 4),
    (64, 128, 8, 4),
    (32, 128, 4, 8),
    (64, 32, 4, 16),
):
    gelu.FORWARD_EIGHT = cfg
    tell(f"gelu fwd both {cfg}", lambda: gelu.bias_gelu_forward(x, b, c4, full=False))
tell("gelu bwd", lambda: gelu.bias_gelu_backward(dy, x, b))
for cfg in (
    (64, 64, 4, 4, 1),
    (64, 64, 4, 8, 1),
    (32, 64, 4, 8, 1),
    (32, 64, 4, 16, 1),
    (64, 32, 4, 8, 1),
    (64, 64, 8, 4, 1),
    (64, 32, 2, 16, 1),
    (32, 128, 8, 4, 1),
    (32, 64, 4, 8, 2),
):
    gelu.BACKWARD_EIGHT = cfg
    tell(f"gelu bwd both {cfg}", lambda: gelu.bias_gelu_backward(dy, x, b, c5, full=False))
from bertrain.kernels.attention import *
import random
from gpu_kernels import draw_lengths

L = draw_lengths(T)
cu = torch.tensor([0, *L], device="cuda").cumsum(0).int()
qkv = normal(T, 3, 16, 64)
dout = normal(T, 16, 64)
tiles = plan_attention(cu, T)
out, lse = ragged_attention_forward(qkv, tiles, 0.1, seed, 0)
tell("attention fwd", lambda: ragged_attention_forward(qkv, tiles, 0.1, seed, 0))
tell("attention bwd", lambda: ragged_attention_backward(qkv, out, lse, dout, tiles, 0.1, seed, 0))
