"""Which engine serves which hardware, and what was tried: the tables of docs/hardware.md; `doctor` prints a row."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Hardware:
    """A family of GPUs or CPUs. Engines are named with the precisions that they compute there."""

    family: str
    examples: str
    kernels: str
    compiled: str
    evidence: str

    @property
    def row(self) -> str:
        return f"| {self.family} | {self.examples} | {self.kernels} | {self.compiled} | {self.evidence} |"

    @property
    def engines(self) -> str:
        return f"kernels {self.kernels}, torch.compile {self.compiled} ({self.evidence})"


ONLY_COMPILED = "every kernel compiled for it, none run"
GPUS = {
    (7, 0): Hardware("Volta, 7.0", "V100", "none", "fp16, fp32", "not tried"),
    (7, 5): Hardware("Turing, 7.5", "T4, RTX 20", "none", "fp16, fp32", "not tried"),
    (8, 0): Hardware("Ampere, 8.0", "A100, A30", "bf16", "fp16, tf32, fp32", ONLY_COMPILED),
    (8, 6): Hardware("Ampere, 8.6", "A10, A40, RTX 30", "bf16", "fp16, tf32, fp32", ONLY_COMPILED),
    (8, 9): Hardware("Ada, 8.9", "L4, L40S, RTX 40", "bf16, fp8", "fp16, tf32, fp32", ONLY_COMPILED),
    (9, 0): Hardware("Hopper, 9.0", "H100, H200, GH200", "bf16, fp8", "fp16, tf32, fp32", "run on an H200"),
    (10, 0): Hardware("Blackwell, 10.0", "B100, B200, GB200", "bf16, fp8", "fp16, tf32, fp32", ONLY_COMPILED),
    (10, 3): Hardware("Blackwell, 10.3", "B300, GB300", "bf16, fp8", "fp16, tf32, fp32", ONLY_COMPILED),
    (12, 0): Hardware("Blackwell, 12.0", "RTX 50, RTX PRO", "bf16, fp8", "fp16, tf32, fp32", ONLY_COMPILED),
}
"""By compute capability; one in between is served as the one below it."""
AMD = Hardware(
    "AMD", "MI200, MI300", "none", "bf16, fp16, fp32",
    "not tried; what it runs was traced and compared on a CPU",
)  # fmt: skip
CPUS = (
    Hardware("x86 with AMX", "Xeon, Sapphire Rapids and newer", "bf16", "on request", "run on Emerald Rapids"),
    Hardware(
        "x86 with AVX-512",
        "Xeon, Skylake to Ice Lake; EPYC 9004",
        "none",
        "on request",
        "run on a newer Xeon by `train.isa avx512`",
    ),
    Hardware(
        "x86 with AVX2", "EPYC 7002, 7003; desktops", "none", "on request", "run on a newer Xeon by `train.isa avx2`"
    ),
    Hardware("ARM", "Neoverse; Graviton, Grace", "none", "on request", "run on Neoverse N1"),
)


def of_gpu(capability: tuple[int, int], *, is_amd: bool = False) -> Hardware:
    """The row of a GPU."""
    if is_amd:
        return AMD
    older = [known for known in GPUS if known <= capability]
    if not older:
        return Hardware(f"{capability[0]}.{capability[1]}", "", "none", "none", "plain PyTorch only")
    return GPUS[max(older)]


def of_cpu(flags: set[str]) -> Hardware:
    """The row of a CPU with these flags of /proc/cpuinfo."""
    amx, avx512, avx2, arm = CPUS
    if "amx_bf16" in flags:
        return amx
    if "avx512f" in flags:
        return avx512
    return arm if flags & {"asimd", "sve"} else avx2
