"""The peer of the speedrun: Transformers' BERT-Base, compiled, on the same text for the same time.

    python benchmarks/speedrun/peer.py NAME --data DIR --held-out DIR [--minutes 9] [--rate 2e-4] [--rows 256]
                                       [--dropout 0.1] [--glue DIR]

What a careful user of Transformers does: the examples of DIR one after another, cut into rows of 128 tokens without
padding; 15 % of the words masked anew each time; BertForMaskedLM under torch.compile in bf16 with sdpa attention, fused
AdamW, gradients clipped, warm-up over 5 % of the time and linear decay to its end. The schedule begins after
compilation. The held-out loss is that of run.py: the same articles, the same masks; evaluations stop the clock. Packed
rows have one segment only, so the second segment's embedding is made equal to the first's before the model is measured
or saved: an untrained one would spoil all pairs. With `--glue`, bertrain fine-tunes the weights as it does its own.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from run import POINTS, RESULTS, add_record, bertrain, fine_tune_all, new_record
from torch import Tensor
from transformers import BertConfig, BertForMaskedLM

from bertrain.data.formats.shards import Shards
from bertrain.data.text.vocabulary import Vocabulary

ROW, MASKED, WARM_UP = 128, 0.15, 0.05
HELD_OUT_ROWS = 256  # at once
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
IGNORED = -100
SINCE_BOOT = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
BEGAN = time.perf_counter() - (time.clock_gettime(time.CLOCK_BOOTTIME) - SINCE_BOOT)
"""When this process was started: imports count, by the rules."""
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def packed_rows(shards: Shards) -> Tensor:
    """All examples one after another, in rows of 128 tokens; what is left over is dropped."""
    parts = [
        shards.read(np.arange(first, min(first + 65536, len(shards)))).tokens for first in range(0, len(shards), 65536)
    ]
    tokens = torch.from_numpy(np.concatenate(parts).astype(np.int32))
    return tokens[: len(tokens) // ROW * ROW].view(-1, ROW)


def masked(ids: Tensor, mask_id: int, special: Tensor, num_words: int) -> tuple[Tensor, Tensor]:
    """Inputs and labels by BERT's rule: of the chosen words 80 % are [MASK], 10 % a random word, 10 % unchanged."""
    chosen = (torch.rand(ids.shape, device=ids.device) < MASKED) & ~special[ids]
    labels = torch.where(chosen, ids, IGNORED)
    draw = torch.rand(ids.shape, device=ids.device)
    random_words = torch.randint(num_words, ids.shape, device=ids.device)
    inputs = torch.where(chosen & (draw < 0.8), mask_id, torch.where(chosen & (draw >= 0.9), random_words, ids))
    return inputs, labels


def held_out_batches(shards: Shards) -> Iterator[dict[str, Tensor]]:
    for first in range(0, len(shards), HELD_OUT_ROWS):
        block = shards.read(np.arange(first, min(first + HELD_OUT_ROWS, len(shards))))
        assert block.masks is not None
        ids, labels, segments = (torch.zeros(HELD_OUT_ROWS, ROW, dtype=torch.long) for _ in range(3))
        labels.fill_(IGNORED)
        begins, predicted = np.cumsum(block.lengths) - block.lengths, 0
        for row, (begin, length) in enumerate(zip(begins, block.lengths, strict=True)):
            ids[row, :length] = torch.from_numpy(block.tokens[begin : begin + length].astype(np.int64))
            segments[row, block.segment_b[row] : length] = 1
            count = int(block.masks.counts[row])
            positions = block.masks.positions[predicted : predicted + count].astype(np.int64)
            labels[row, positions] = torch.from_numpy(
                block.masks.labels[predicted : predicted + count].astype(np.int64)
            )
            predicted += count
        yield {"input_ids": ids, "attention_mask": (ids != 0).long(), "token_type_ids": segments, "labels": labels}


class HeldOut:
    def __init__(self, shards: Shards) -> None:
        self._batches = [
            {name: tensor.to(DEVICE) for name, tensor in batch.items()} for batch in held_out_batches(shards)
        ]

    @torch.no_grad()
    def loss_of(self, model: BertForMaskedLM) -> dict[str, float]:
        model.eval()
        segments = model.bert.embeddings.token_type_embeddings.weight
        segments[1] = segments[0]
        loss = right = count = 0.0
        for batch in self._batches:
            known = batch["labels"] != IGNORED
            with torch.autocast(DEVICE.type, torch.bfloat16):
                logits = model(**{name: tensor for name, tensor in batch.items() if name != "labels"}).logits[known]
            labels = batch["labels"][known]
            loss += torch.nn.functional.cross_entropy(logits.float(), labels, reduction="sum").item()
            right += (logits.argmax(-1) == labels).sum().item()
            count += len(labels)
        model.train()
        return {"mlm_loss": loss / count, "mlm_accuracy": right / count}


def train(
    model: BertForMaskedLM, rows: Tensor, words: Vocabulary, held_out: HeldOut, options: argparse.Namespace
) -> dict[str, Any]:
    minutes, rate, batch = options.minutes, options.rate, options.rows
    special = torch.zeros(model.config.vocab_size, dtype=torch.bool, device=DEVICE)
    special[[words.id_of(word) for word in SPECIAL]] = True
    optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=0.01, fused=DEVICE.type == "cuda")
    loss_of = torch.compile(lambda **tensors: model(**tensors).loss)
    curve, evaluations = list[list[float]](), list[list[float]]()
    step, order = 0, torch.randperm(len(rows))

    def take_step(factor: float) -> Tensor:
        for group in optimizer.param_groups:
            group["lr"] = rate * factor
        place = step * batch % (len(order) - batch)
        ids = rows[order[place : place + batch]].to(DEVICE, non_blocking=True).long()
        inputs, labels = masked(ids, words.id_of("[MASK]"), special, model.config.vocab_size)
        with torch.autocast(DEVICE.type, torch.bfloat16):
            loss = loss_of(input_ids=inputs, labels=labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    take_step(0.0).item()  # compiles
    start_up, began, paused = time.perf_counter() - BEGAN, time.perf_counter(), 0.0
    while (elapsed := time.perf_counter() - began - paused) < 60 * minutes:
        share = elapsed / (60 * minutes)
        loss = take_step(min(share / WARM_UP, (1 - share) / (1 - WARM_UP)))
        step += 1
        if step % 50 == 0:
            curve.append([round(start_up + elapsed, 1), round(loss.item(), 3)])
        if elapsed // 60 > len(evaluations):
            stopped = time.perf_counter()
            evaluations.append([round(start_up + elapsed, 1), round(held_out.loss_of(model)["mlm_loss"], 4)])
            paused += time.perf_counter() - stopped
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    seconds = start_up + time.perf_counter() - began - paused
    return {
        "seconds": round(seconds, 1),
        "start_up_s": round(start_up, 1),
        "steps": step,
        "tokens": step * batch * ROW,
        "curve": curve[:: max(1, len(curve) // POINTS)],
        "evaluations": evaluations,
        "held_out": held_out.loss_of(model),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--held-out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--rate", type=float, default=2e-4)
    parser.add_argument("--rows", type=int, default=256, help="of 128 tokens in a step")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--glue", type=Path)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.manual_seed(1)
    dropout = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), options.dropout)
    config = BertConfig(num_hidden_layers=options.layers, **dropout)
    config._attn_implementation = "sdpa"
    model: Any = BertForMaskedLM(config)  # Transformers' annotation of `to` takes no device
    model.to(DEVICE)
    shards = Shards.open(options.data, verify="size")
    settings = [f"--{name} {vars(options)[name]}" for name in ("rate", "minutes", "rows", "dropout", "layers")]
    record = new_record(options.name, ["transformers", *settings])
    rows, held_out = packed_rows(shards), HeldOut(Shards.open(options.held_out, verify="size"))
    record |= train(model, rows, shards.vocabulary, held_out, options)
    print({name: value for name, value in record.items() if name != "curve"}, flush=True)
    if options.glue:
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            shards.vocabulary.save(Path(folder) / "vocab.txt")
            subprocess.run(bertrain("weights", "show", folder), check=True)
            record["tasks"] = fine_tune_all(Path(folder), options.glue, Path(folder))
    add_record(options.output, record)


if __name__ == "__main__":
    main()
