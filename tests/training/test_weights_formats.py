"""A run that starts from TensorFlow weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
from safetensors.torch import load_file

from bertrain.config.resolve import resolve
from bertrain.training.fill_mask import fill_mask
from bertrain.training.start import pretrain
from bertrain.weights.export import export
from bertrain.weights.inspect import compare_weights, is_same
from tests import bundles, helpers
from tests.quick.test_weights_formats import tensorflow_name


def test_tensorflow_weights_begin_a_run_and_fill_masks(tmp_path: Path) -> None:
    """A run's weights under TensorFlow's names, compressed and in two files, with the slots of an optimizer."""
    data = helpers.make_data(tmp_path)
    settings = helpers.tiny_settings(train__max_steps=2, model__pad_vocab_to=64)
    pretrain(settings, data, tmp_path / "run")
    exported = export(tmp_path / "run", tmp_path / "exported")
    values = {}
    for name, tensor in load_file(exported / "model.safetensors").items():
        theirs = tensorflow_name(name)
        values[theirs] = np.ascontiguousarray(tensor.numpy().T if theirs.endswith("/kernel") else tensor.numpy())
        values |= {f"{theirs}/adam_m": values[theirs], f"{theirs}/adam_v": values[theirs]}
    (tmp_path / "tf").mkdir()
    bundles.write_bundle(tmp_path / "tf" / "model.ckpt-2", values, snappy=True, num_shards=2)
    shutil.copy(exported / "config.json", tmp_path / "tf" / "bert_config.json")
    shutil.copy(exported / "vocab.txt", tmp_path / "tf")
    assert is_same(compare_weights(tmp_path / "run", tmp_path / "tf" / "model.ckpt-2"))
    assert fill_mask(tmp_path / "tf", ["bato [MASK]"]) == fill_mask(tmp_path / "run", ["bato [MASK]"])

    overrides = helpers.TINY | {"model.vocab_size": str(helpers.vocab_size()), "train.max_steps": "1"}
    frozen = resolve("bert-tiny", list((overrides | {"optimizer.learning_rate": "0"}).items()))
    for number, source in enumerate((tmp_path / "tf", export(tmp_path / "run", tmp_path / "nv", to="nvidia"))):
        pretrain(frozen, data, tmp_path / f"again{number}", init=str(source))
        assert is_same(compare_weights(tmp_path / "run", tmp_path / f"again{number}"))
