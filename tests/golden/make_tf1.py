"""Make `tf1-mlperf/` and the values that TensorFlow reads in both checkpoints, with TensorFlow itself.

    python -m venv tensorflow && tensorflow/bin/pip install tensorflow-cpu
    tensorflow/bin/python tests/golden/make_tf1.py

The checkpoint is MLPerf's model.ckpt-28252 in miniature: its names, with the slots of LAMB and a global_step, written
by tf.compat.v1.train.Saver on two devices, so in two data files. Its vocabulary of 30 words is a multiple of neither 8
nor 64.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import tensorflow as tf

HERE = Path(__file__).parent
STEP = 28252
CONFIG = {
    "attention_probs_dropout_prob": 0.1,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 8,
    "initializer_range": 0.02,
    "intermediate_size": 32,
    "max_position_embeddings": 16,
    "num_attention_heads": 2,
    "num_hidden_layers": 3,
    "type_vocab_size": 2,
    "vocab_size": 30,
}


def variables() -> dict[str, tuple[int, ...]]:
    """Names and shapes as google-research/bert's modeling.py and run_pretraining.py make them."""
    hidden, inner, words = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["vocab_size"]
    shapes = {
        "bert/embeddings/word_embeddings": (words, hidden),
        "bert/embeddings/token_type_embeddings": (2, hidden),
        "bert/embeddings/position_embeddings": (CONFIG["max_position_embeddings"], hidden),
        "cls/predictions/output_bias": (words,),
        "cls/seq_relationship/output_weights": (2, hidden),
        "cls/seq_relationship/output_bias": (2,),
    }
    dense = {"bert/pooler/dense": (hidden, hidden), "cls/predictions/transform/dense": (hidden, hidden)}
    norms = ["bert/embeddings/LayerNorm", "cls/predictions/transform/LayerNorm"]
    for number in range(CONFIG["num_hidden_layers"]):
        layer = f"bert/encoder/layer_{number}"
        dense |= {f"{layer}/attention/self/{part}": (hidden, hidden) for part in ("query", "key", "value")}
        dense[f"{layer}/attention/output/dense"] = (hidden, hidden)
        dense[f"{layer}/intermediate/dense"] = (hidden, inner)
        dense[f"{layer}/output/dense"] = (inner, hidden)
        norms += [f"{layer}/attention/output/LayerNorm", f"{layer}/output/LayerNorm"]
    for name, shape in dense.items():
        shapes |= {f"{name}/kernel": shape, f"{name}/bias": shape[1:]}
    for name in norms:
        shapes |= {f"{name}/gamma": (hidden,), f"{name}/beta": (hidden,)}
    return shapes


def save(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    draw = np.random.default_rng(28252)
    with tf.Graph().as_default():
        made = []
        for number, (name, shape) in enumerate(variables().items()):
            with tf.device(f"/cpu:{number % 2}"):
                for slot in ("", "/LAMB", "/LAMB_1"):
                    value = draw.standard_normal(shape).astype(np.float32)
                    made.append(tf.compat.v1.get_variable(name + slot, initializer=value, use_resource=False))
        with tf.device("/cpu:0"):
            for name in ("beta1_power", "beta2_power"):
                made.append(tf.compat.v1.get_variable(name, initializer=np.float32(0.5), use_resource=False))
            step = tf.compat.v1.get_variable("global_step", initializer=np.int64(STEP), use_resource=False)
        options = tf.compat.v1.ConfigProto(device_count={"CPU": 2})
        with tf.compat.v1.Session(config=options) as session:
            session.run(tf.compat.v1.global_variables_initializer())
            saver = tf.compat.v1.train.Saver([*made, step], sharded=True)
            saver.save(session, str(folder / "model.ckpt"), global_step=STEP, write_meta_graph=False)
    (folder / "checkpoint").unlink()
    (folder / "bert_config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")


def write_values(checkpoint: Path) -> None:
    """All that TensorFlow reads in a checkpoint, optimizer slots too."""
    reader = tf.train.load_checkpoint(str(checkpoint))
    names = sorted(reader.get_variable_to_shape_map())
    np.savez_compressed(checkpoint.parent / "values.npz", **{name: reader.get_tensor(name) for name in names})


if __name__ == "__main__":
    save(HERE / "tf1-mlperf")
    write_values(HERE / "tf1-mlperf" / f"model.ckpt-{STEP}")
    write_values(HERE / "tf1-google" / "bert_model.ckpt")
