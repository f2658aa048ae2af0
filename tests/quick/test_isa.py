"""A cap on instructions holds: the libraries themselves say which kernels they ran."""

from __future__ import annotations

import sys

import pytest

from bertrain.base import isa, machine
from bertrain.base.doctor import doctor
from tests import helpers

needs = pytest.mark.skipif


def has(name: str) -> bool:
    return isa.FLAGS[name] in isa.cpu_flags()


def test_what_the_cpu_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isa, "cpu_flags", lambda: {"avx2"})
    with helpers.refused("unsupported-isa", "train.isa is amx", "avx2"):
        isa.cap_isa("amx")


@needs(not has("avx2"), reason="this CPU has no AVX2")
def test_a_cap_that_comes_too_late_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in isa.CAPS["avx2"]:
        monkeypatch.delenv(name, raising=False)
    with helpers.refused("isa-too-late", "ONEDNN_MAX_CPU_ISA=AVX2"):
        isa.cap_isa("avx2")
    for name, value in isa.CAPS["avx2"].items():
        monkeypatch.setenv(name, value)
    isa.cap_isa("avx2")
    assert isa.describe("auto") == "instructions up to avx2 (ONEDNN_MAX_CPU_ISA=AVX2)"
    assert isa.describe("avx2") == "instructions up to avx2 (train.isa)"


def test_fp16_without_its_own_amx_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isa, "cpu_flags", lambda: {"avx2", "avx512bw", "amx_tile", "amx_bf16"})
    monkeypatch.setattr(isa, "capped_outside", lambda: (None, ""))
    assert isa.describe("auto", "fp16") == "instructions up to avx512 (this CPU has no AMX for fp16)"
    assert isa.describe("auto", "bf16") == "instructions up to amx (all this CPU has)"
    monkeypatch.setattr(isa, "cpu_flags", lambda: {"avx2", "avx512bw", "amx_tile", "amx_fp16"})
    assert isa.describe("auto", "fp16") == "instructions up to amx (all this CPU has)"


SAPPHIRE_RAPIDS = "avx2 avx512bw avx512_bf16 avx512_fp16 amx_tile amx_bf16"


@pytest.mark.parametrize(
    ("flags", "variable", "usable", "slow", "reason"),
    [
        (SAPPHIRE_RAPIDS, "", "amx", "", ""),
        (SAPPHIRE_RAPIDS, "AVX512_CORE_FP16", "avx512", "", ""),
        (SAPPHIRE_RAPIDS, "avx2", "avx2", "bf16 fp16", "DNNL_MAX_CPU_ISA=AVX2"),
        (SAPPHIRE_RAPIDS.replace("avx512_fp16 ", ""), "", "amx", "fp16", "avx512_fp16 or amx_fp16"),
        (f"{SAPPHIRE_RAPIDS} amx_fp16".replace("avx512_fp16 ", ""), "", "amx", "", ""),
        (f"{SAPPHIRE_RAPIDS} amx_fp16".replace("avx512_fp16 ", ""), "AVX512_CORE_AMX", "amx", "fp16", "avx512_fp16"),
        (SAPPHIRE_RAPIDS, "AVX512_CORE", "avx512", "bf16 fp16", "DNNL_MAX_CPU_ISA=AVX512_CORE"),
        (SAPPHIRE_RAPIDS, "AVX512_CORE_BF16", "avx512", "fp16", "DNNL_MAX_CPU_ISA=AVX512_CORE_BF16"),
        ("avx2 avx512bw", "AVX512_CORE_AMX", "avx512", "bf16 fp16", "avx512_"),
        ("avx2", "nonsense", "avx2", "bf16 fp16", "avx2 has no"),
        ("asimd asimdhp", "AVX2", None, "bf16 fp16", "bf16"),
        ("asimd sve bf16", "", None, "", ""),
    ],
)  # fmt: skip
def test_the_users_own_cap_and_what_is_emulated(
    monkeypatch: pytest.MonkeyPatch, flags: str, variable: str, usable: str | None, slow: str, reason: str
) -> None:
    """By the flags that Linux reports, and oneDNN's variable under its older name, as Intel's scripts set it."""
    monkeypatch.setattr(isa, "cpu_flags", lambda: set(flags.split()))
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    monkeypatch.setenv("DNNL_MAX_CPU_ISA", variable)
    assert isa.usable("auto") == usable
    reasons = {precision: isa.emulation(precision, "auto") for precision in ("fp32", "bf16", "fp16")}
    assert [precision for precision, why in reasons.items() if why] == slow.split()
    assert all(reason in reasons[precision] for precision in slow.split())
    if "amx_tile" in flags and usable != "amx":
        assert isa.describe("auto") == f"instructions up to {usable} (DNNL_MAX_CPU_ISA={variable.upper()})"
        with helpers.refused("isa-capped", "DNNL_MAX_CPU_ISA"):
            isa.cap_isa("amx")


@pytest.mark.parametrize(
    ("core", "features", "name", "instructions"),
    [
        ("0x41 0xd0c", "fp asimd", "Neoverse N1", "asimd"),
        ("0x41 0xd4f", "fp asimd sve sve2 bf16", "Neoverse V2", "sve2"),
    ],
)
def test_an_arm_cpu_has_a_name_and_instructions(
    monkeypatch: pytest.MonkeyPatch, core: str, features: str, name: str, instructions: str
) -> None:
    implementer, part = core.split()
    fields = {"Features": features, "CPU implementer": implementer, "CPU part": part}
    monkeypatch.setattr(machine, "_cpuinfo", lambda field: fields.get(field, ""))
    monkeypatch.setattr(isa, "capped_outside", lambda: (None, ""))
    assert machine.cpu_name() == name
    assert isa.describe("auto") == f"instructions up to {instructions} (all this CPU has)"
    assert isa.usable("auto") is None
    (finding,) = (finding for finding in doctor() if finding.subject == "cpu")
    assert finding.found == f"{name}: {features.removeprefix('fp ')}"
    assert "AMX" in finding.consequence


def test_gpus_are_read_off_nvidia_smi() -> None:
    text = (
        "0, NVIDIA H200, 31, 0\nNo devices were found\n1, NVIDIA H200, 35, 2\n"
        "[Unknown Error], NVIDIA H200, 35, 2\n2, Quadro, 4, [N/A]\n"
    )
    assert machine.parse_gpus(text) == (
        machine.Gpu(0, "NVIDIA H200", 31, 0),
        machine.Gpu(1, "NVIDIA H200", 35, 2),
        machine.Gpu(2, "Quadro", 4, 0),
    )
    processes = machine.parse_gpu_processes("12, python, 300\n34, vmd, [N/A]\nno line\n12, python, 50\n")
    assert processes == {12: "python (12, 350 MB)", 34: "vmd (34, 0 MB)"}


def test_doctor_reports_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # an import of it fails
    missing = [(finding.subject, finding.consequence) for finding in doctor() if finding.verdict == "missing"]
    assert [subject for subject, _ in missing] == ["packages", "gpu"]
    assert "torch" in missing[0][1]


def test_this_machine_has_memory() -> None:
    total, free = machine.total_memory(), machine.free_memory()
    assert total is not None
    assert free is not None
    assert 0 < free <= total
