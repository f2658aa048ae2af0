"""`bertrain plan` on the command line: its table, JSON and picture, its errors, and a profile to calibrate on."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

from tests.miniature_tasks import command_line

ROOT = Path(__file__).parents[2]
MLPERF = ("plan", "mlperf-nvidia-1x8x48-packed", "--lengths", ROOT / "benchmarks" / "wikipedia-512.csv")


def test_a_plan_as_json_and_as_a_picture(tmp_path: Path) -> None:
    picture = tmp_path / "plan.svg"
    command = (*MLPERF, "--gpu", "h200", "--count", "16,8,16", "--target", "0.72", "--price", "3", "--plot", picture)
    found = json.loads(command_line(*command, "--json").out)
    eight, sixteen = found["plans"]
    assert (found["gpu"], found["network"], found["per_node"]) == ("h200", "nvlink+8xib-ndr", 8)
    assert (eight["count"], sixteen["count"]) == (8, 16)
    assert eight["steps"] == pytest.approx(3179, abs=20)
    assert sum(eight["parts_ms"].values()) == pytest.approx(eight["step_ms"], abs=0.01)
    assert eight["price"] == pytest.approx(3 * eight["gpu_hours"])
    step = f"16: {sixteen['step_ms']:.1f} ms"
    assert {"minutes", "predicted time to train", step} <= set(re.findall(r"<!-- (.*?) -->", picture.read_text()))


def test_a_picture_of_many_counts_has_a_logarithmic_axis(tmp_path: Path) -> None:
    picture = tmp_path / "plan.svg"
    counts = "1,2,4,8,16,32,64,128"
    command_line("plan", "bert-base", "--gpu", "h200", "--count", counts, "--batch-size", "4096", "--plot", picture)
    assert {"1", "10", "hours"} <= set(re.findall(r"<!-- (.*?) -->", picture.read_text()))


def test_the_printed_options_make_the_tuned_plan() -> None:
    """The recipe sets more of the batch than token budget and policy."""
    command = ("plan", "mlperf-intel-8x4x64", "--gpu", "h200", "--count", "8", "--lengths", "mlperf")
    tuned = command_line(*command, "--tune").out
    options = re.search(r"8 GPUs: (--batch.*) is the fastest", tuned)
    assert options is not None
    assert options[1].endswith(" --batch.bin_sequences 0")
    (of_json,) = json.loads(command_line(*command, "--tune", "--json").out)["tuned"]
    (again,) = json.loads(command_line(*command, *shlex.split(options[1]), "--json").out)["plans"]
    assert again == of_json


def test_a_profile_calibrates_the_gpu() -> None:
    """That of an H200 in the tests' data: 95.2 ms where the table has less."""
    profile = ROOT / "tests" / "data" / "profile-h200"
    printed = command_line(*MLPERF, "--gpu", "h200", "--calibrate", profile, "--within", "10m").out
    assert "calibrated on" in printed
    assert "95.19 ms" in printed
    assert "GPUs, with --batch.token_budget" in printed
    assert "other data may need more or fewer samples" not in printed, "no target"


def test_profiles_of_several_settings_calibrate_nothing(tmp_path: Path) -> None:
    for name in ("one", "other"):
        shutil.copytree(ROOT / "tests" / "data" / "profile-h200" / "node-cuda0", tmp_path / name)
    file = tmp_path / "other" / "repeat-1" / "device.json"
    facts = json.loads(file.read_text())
    facts["settings"]["batch"]["token_budget"] *= 2
    file.write_text(json.dumps(facts))
    done = command_line(*MLPERF, "--gpu", "h200", "--calibrate", tmp_path, check=False)
    assert (done.code, done.out) == (2, "")
    assert "[different-profiles]" in done.err


def test_a_target_on_other_data_is_noted() -> None:
    found = json.loads(command_line(*MLPERF, "--gpu", "h200", "--target", "0.72", "--json").out)
    assert any("other data may need more or fewer samples" in note for note in found["notes"])


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (("--gpu", "h900"), "unknown-gpu", "h200"),
        (("--gpu", "h100", "--target", "0.72", "--batch.sequences", "64", "--batch.tokens", "0",
          "--mlperf.global_batch_size", "0"), "no-convergence-points", "16,384"),
        (("--gpu", "h100", "--target", "0.72", "--model.num_layers", "12"), "no-convergence-points", "12 layers"),
        (("--gpu", "h100", "--target", "0.72", "--optimizer.name", "adamw"), "no-convergence-points", "adamw"),
        (("--gpu", "h100", "--target", "0.9"), "no-convergence-points", "0.9"),
        (("--gpu", "a100"), "precision-not-on-gpu", "fp8"),
        (("--gpu", "rtx4090"), "out-of-memory", "rtx4090"),
        (("--gpu", "h100", "--count", "8,many"), "bad-count", "many"),
        (("--gpu", "h100", "--count", "2000000"), "bad-count", "1 to 1,000,000"),
        (("--gpu", "h100", "--epochs", "2"), "epochs-need-data", "--data"),
        (("--gpu", "h100", "--batch-size", "1024"), "step-size", "0"),
        (("--gpu", "h100", "--network", "string"), "unknown-network", "ib-hdr"),
        (("--gpu", "h200", "--train.kernels", "compiled"), "engine-not-possible", "compiled"),
        (("--gpu", "h200", "--train.kernels", "fused", "--train.precision", "fp32"), "engine-not-possible", "fp32"),
        (("--gpu", "h200", "--network", "nvlink+0xib-hdr"), "unknown-network", "0xib-hdr"),
        (("--gpu", "h100", "--calibrate", ROOT / "tests" / "data" / "profile-h200"), "conflicting-options", "H200"),
        (("--gpu", "h200", "--within", "10m", "--count", "8"), "conflicting-options", "--count"),
        (("--gpu", "h200", "--within", "10m", "--spend", "5", "--price", "3"), "conflicting-options", "--spend"),
        (("--gpu", "h100", "--data", "."), "conflicting-options", "--lengths"),
        (("--gpu", "h100", "--plot", "plan.txt"), "bad-picture", ".svg"),
    ],
)  # fmt: skip
def test_bad_input_is_refused(arguments: tuple[str | Path, ...], code: str, named: str) -> None:
    done = command_line(*MLPERF, *arguments, check=False)
    assert done.code == 2
    assert f"[{code}]" in done.err
    assert named in done.err
    assert done.out == ""
