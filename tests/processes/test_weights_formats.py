"""`bertrain weights` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from bertrain.weights.export import import_weights
from tests.miniature_tasks import command_line
from tests.quick.test_weights_formats import GOOGLE, MLPERF, companions, said


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("imported") / "google"
    import_weights(GOOGLE, folder)
    return folder


def test_the_commands(imported: Path, tmp_path: Path) -> None:
    assert "cls/predictions/output_bias  15  float32  60 bytes  -> masked_words.bias" in said("show", GOOGLE)
    assert "tf1, step 20, 701 parameters" in said("show", GOOGLE)
    assert "38 of 38 tensors are equal; the same" in said("compare", GOOGLE, imported)
    done = said("import", MLPERF, "--out", tmp_path / "out")
    assert "62 LAMB, 62 LAMB_1, 1 beta1_power, 1 beta2_power, 1 global_step" in done
    assert "no tokenizer was written" in done
    assert "model.ckpt-28252.pt: give it to" in said("export", MLPERF, "--to", "nvidia", "--out", tmp_path / "nv")

    folder = companions(imported, tmp_path / "other")
    tensors = load_file(imported / "model.safetensors")
    tensors["bert.pooler.dense.bias"] = tensors["bert.pooler.dense.bias"] + torch.tensor([0, 0, 0.25, 0])
    save_file(tensors, folder / "model.safetensors")
    done = command_line("weights", "compare", imported, folder, "--json", check=False)
    assert done.code == 1
    found = json.loads(done.out)
    assert not found["same"]
    (different,) = [tensor for tensor in found["tensors"] if tensor["verdict"] != "equal"]
    assert different["name"] == "next_sentence.pool.bias"
    assert different["largest_absolute"] == pytest.approx(0.25)
    assert "37 of 38 tensors are equal; the same" in said("compare", imported, folder, "--tolerance", "0.26")
