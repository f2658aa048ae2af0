"""8-bit copies: a kernel that makes a tensor also writes it in 8 bits, scaled, and notes how large it was.

The scale is the one the previous step called for (delayed scaling): the largest magnitude then seen is mapped onto
the format's largest number. Values that outgrow it meanwhile saturate. E4M3 (448 at the most) holds weights and
activations, E5M2 (57,344) gradients, whose range is wider.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bertrain.kernels.backend import jit, tl

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


@dataclass(frozen=True)
class Cast:
    """Where a kernel finds the scale of its 8-bit result, and where each program leaves the largest magnitude."""

    dtype: torch.dtype
    scale: torch.Tensor  # [1]
    largest: torch.Tensor  # one entry per program, at least


def cast_plain(values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The specification: scaled, cut at the format's largest number, rounded to nearest."""
    limit = LARGEST[dtype]
    return (values.float() * scale).clamp(-limit, limit).to(dtype)


def limit_of(cast: Cast | None) -> float:
    """The largest number of the format, or 0 where nothing is to be cast."""
    return 0.0 if cast is None else LARGEST[cast.dtype]


def scale_and_largest(cast: Cast | None, stand_in: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What a kernel is given for them; a tensor that nobody reads where nothing is to be cast."""
    return (stand_in, stand_in) if cast is None else (cast.scale, cast.largest)


@jit
def quantise(values, scale, LIMIT: tl.constexpr):
    """Scaled and cut to what the format can hold, still in float32; the store converts."""
    return tl.minimum(tl.maximum(values * scale, -LIMIT), LIMIT)


@jit
def _cast_both_ways_kernel(
    values, out, out_t, scale, largest, num_rows, num_columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    columns = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    mask = (rows < num_rows) & (columns < num_columns)
    block = tl.load(values + rows.to(tl.int64) * num_columns + columns, mask=mask, other=0.0).to(tl.float32)
    quantised = quantise(block, tl.load(scale), LIMIT).to(out.dtype.element_ty)
    tl.store(out + rows.to(tl.int64) * num_columns + columns, quantised, mask=mask)
    tl.store(out_t + tl.trans(columns.to(tl.int64) * num_rows + rows), tl.trans(quantised), mask=tl.trans(mask))
    peak = tl.max(tl.max(tl.abs(block), axis=1), axis=0)
    tl.store(largest + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), peak)


def cast_both_ways(values: torch.Tensor, cast: Cast, out: torch.Tensor, out_t: torch.Tensor) -> None:
    """An 8-bit copy of a matrix [N, K], and one of its transpose [K, N]: products want both, each along its rows."""
    num_rows, num_columns = values.shape
    grid = (-(-num_rows // 64), -(-num_columns // 64))
    _cast_both_ways_kernel[grid](
        values, out, out_t, cast.scale, cast.largest, num_rows, num_columns,
        ROWS=64, COLUMNS=64, LIMIT=LARGEST[cast.dtype], num_warps=4,
    )  # fmt: skip


@jit
def _collect_kernel(partials, largest, width, BLOCK: tl.constexpr):
    site = tl.program_id(0)
    peak = tl.zeros([BLOCK], dtype=tl.float32) + tl.load(largest + site)
    for first in range(0, width, BLOCK):
        places = first + tl.arange(0, BLOCK)
        peak = tl.maximum(peak, tl.load(partials + site * width + places, mask=places < width, other=0.0))
    tl.store(largest + site, tl.max(peak, axis=0))


class Scales:
    """The scale of every 8-bit tensor of a model, and the largest magnitudes that decide the next step's.

    `formats` names each tensor's format. Scales start at 1 and mean nothing before the first `update`, so the first
    step of a run is computed in 16 bits and only measured.
    """

    def __init__(self, formats: list[torch.dtype], device: torch.device) -> None:
        self.formats = formats
        self._limits = torch.tensor([LARGEST[dtype] for dtype in formats], device=device)
        self.scale = torch.ones(len(formats), device=device)
        self._inverse = torch.ones(len(formats), 4, device=device)  # cuBLAS wants each on a 16-byte boundary
        self.largest = torch.zeros(len(formats), device=device)
        self._partials: torch.Tensor | None = None
        self.ready = False
        """Whether the scales come from a measurement; until then they only take part in one."""

    def measure_into(self, partials: torch.Tensor) -> None:
        """Let kernels leave their magnitudes in `partials` [sites, programs], which must start as zeros."""
        self._partials = partials

    def cast(self, site: int) -> Cast:
        assert self._partials is not None, "measure_into comes first"
        return Cast(self.formats[site], self.scale[site : site + 1], self._partials[site])

    def inverse(self, site: int) -> torch.Tensor | None:
        """What to multiply the 8-bit tensor by to have its values back, a scalar on the device; None before `ready`."""
        return self._inverse[site, 0] if self.ready else None

    def collect(self) -> None:
        """Take up what the kernels of a bin have left."""
        assert self._partials is not None, "measure_into comes first"
        _collect_kernel[(len(self.formats),)](self._partials, self.largest, self._partials.shape[1], BLOCK=1024)

    def update(self) -> None:
        """The next step's scales. A tensor that was all zero or not finite keeps the one it has."""
        usable = (self.largest > 0) & torch.isfinite(self.largest)
        self.scale.copy_(torch.where(usable, self._limits / self.largest, self.scale))
        self._inverse.copy_((1 / self.scale)[:, None])
        self.largest.zero_()
        self.ready = True
