"""The image, built for real: what runs in it, as which user, and that its training works."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.miniature import make_miniature, miniature_arguments
from tests.services.image import ROOT, Images, scratch_folder

pytestmark = [
    pytest.mark.services,
    pytest.mark.long,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        os.geteuid() != 0 or not shutil.which("buildah") or not shutil.which("mmdebstrap"),
        reason="building an image here needs root, buildah and mmdebstrap; Debian's packages are called so",
    ),
]
ONE_THREAD = ("--train.threads", 1)


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Images]:
    made = Images(scratch_folder(tmp_path_factory.mktemp("image")))
    try:
        made.build()
        yield made
    finally:
        made.remove()


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that any user may write to."""
    folder = tmp_path_factory.mktemp("out")
    folder.chmod(0o777)
    return folder


@pytest.fixture(scope="module")
def trained(image: Images, out: Path) -> Path:
    """The demo's model after its first 20 steps."""
    demo = ROOT / "demo"
    image.start(
        *("train", demo / "train-1.txt", demo / "train-2.txt", "--out", out / "demo", "--budget", "2m"),
        # With a bias of zero, the first steps learn which words are frequent.
        *("--max-steps", 20, "--evaluate.max_examples", 50, "--model.initial_bias", "zero", *ONE_THREAD),
        volumes={demo: "ro", out: "rw"},
    )
    return out / "demo"


def test_it_has_all_extras_and_a_compiler(image: Images, out: Path) -> None:
    found = json.loads(image.start("doctor", out, "--json", volumes={out: "rw"}))
    verdicts = {one["subject"]: one["verdict"] for one in found}
    assert [verdicts[name] for name in ("python", "packages", "extras", "compilers")] == ["ok"] * 4


def test_it_runs_as_a_normal_user(image: Images, trained: Path) -> None:
    assert image.configuration()["User"] == "bertrain"
    assert trained.stat().st_uid >= 1000


def test_the_demo_learns(trained: Path) -> None:
    lines = [json.loads(line) for line in (trained / "run" / "metrics.jsonl").open()]
    losses = [line["loss"] for line in lines if line["kind"] == "step"]
    assert losses[-1] < losses[0] - 0.5
    assert (trained / "model" / "model.safetensors").is_file()
    assert "<svg" in (trained / "report.html").read_text(), "curves need an extra"


def test_an_mlperf_experiment_passes_the_official_checker(image: Images, out: Path, tmp_path: Path) -> None:
    miniature = make_miniature(tmp_path)
    miniature.chmod(0o755)  # pytest's folders are their user's alone
    said = image.start(
        *("mlperf", "run", "bert-tiny", "--data", miniature / "train", "--out", out / "mlperf", "--nexp", 1),
        *miniature_arguments(miniature),
        volumes={miniature: "ro", out: "rw"},
    )
    assert "experiment 0: converged" in said
    assert "result_0.txt  rules 5.0.0: complies" in said


def test_finetuning_scores_a_task_of_glue(image: Images, trained: Path, out: Path) -> None:
    glue = ROOT / "tests" / "data" / "glue"
    said = image.start(
        *("finetune", "glue/rte", "--data", glue, "--init", trained / "model", "--run", out / "rte", "--json"),
        *("--max-steps", 3, *ONE_THREAD),
        volumes={glue: "ro", out: "rw"},
    )
    (outcome,) = json.loads(said)
    assert outcome["figures"]["examples"]["mean"] == 12
    assert outcome["figures"]["accuracy"]["mean"] in [right / 12 for right in range(13)]


def test_any_user_can_profile(image: Images, out: Path) -> None:
    """As with docker's --user, and under pyxis: a number that the image does not know."""
    image.start(
        *("profile", "run", "bert-tiny", "--steps", 2, "--warm-up-steps", 3, "--batch.token_budget", 512),
        *("--out", out / "profile", *ONE_THREAD),
        volumes={out: "rw"},
        user="4321:4321",
    )
    assert (out / "profile").stat().st_uid == 4321
