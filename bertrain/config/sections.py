"""All sections of a run's settings but `model` and `task`. A setting has a type, a default, a range and a help text.

`settings.py` joins all sections and refuses settings that contradict each other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from bertrain.base.errors import UserError
from bertrain.base.units import parse_fits, parse_slice
from bertrain.config.choices import (
    MASK_PROBABILITY,
    MODERN_MASK_PROBABILITY,
    PACKING,
    TRACKERS,
    Device,
    Kernels,
    PolicyName,
    StepPacking,
)
from bertrain.config.fields import changeable, setting


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """How examples become model input. The data folder itself is --data."""

    max_seq_length: int = setting(
        128, "longest example in tokens, [CLS] and [SEP] included; 0: as the data was prepared", min=5, or_zero=True
    )
    max_predictions: int = setting(
        20,
        "most masked words in one example; 0: that of already masked data, else mask_probability x max_seq_length",
        min=0,
    )
    mask_probability: float = setting(
        MASK_PROBABILITY,
        f"share of tokens to predict in training; default for model.family modern: {MODERN_MASK_PROBABILITY}. "
        f"Evaluations always mask {MASK_PROBABILITY}",
        min=0.001,
        max=0.5,
    )
    whole_word: bool = setting(False, "mask whole words instead of single word pieces")
    generator: str = setting(
        "",
        "model.rtd: a run or weights of a smaller BERT with the same vocabulary, whose guesses replace words; it is "
        "not trained",
    )
    replaced_share: float = setting(
        0.5, "model.rtd: share of the words to predict that data.generator replaces; the others are masked", min=0.01,
        max=1,
    )  # fmt: skip
    slice: str = setting("", "part of the rows to train on, in file order, such as 0:0.9; empty: all")
    vocab: str = changeable(
        "", "vocabulary file of HDF5 or TFRecord data; empty: vocab.txt beside it, or BERT's uncased vocabulary"
    )
    verify: Literal["hash", "size"] = changeable(
        "hash", "check of each data file at the start. hash: its SHA-256; size: only its size (faster on terabytes)"
    )

    def rows(self, num_rows: int) -> range:
        """The rows that `slice` selects; 0:0.9 and 0.9:1 share none and miss none."""
        begin, end = parse_slice(self.slice)
        return range(int(begin * num_rows), int(end * num_rows))

    def usual_predictions(self) -> int:
        """mask_probability of max_seq_length, rounded up: the most masked words if max_predictions is 0."""
        return math.ceil(self.mask_probability * self.max_seq_length - 1e-9)


@dataclass(frozen=True, kw_only=True)
class BatchSettings:
    """The examples of one optimizer step, and how many tokens a device computes at once.

    A bin is one micro-batch of a device: whole examples one after another, without padding between them.
    """

    sequences: int = setting(0, "examples in a step; 0: batch.tokens sets the size of a step", min=0)
    tokens: int = setting(0, "most real tokens in a step; 0: batch.sequences sets the size of a step", min=0)
    ramp_tokens: int = setting(
        0,
        "tokens over which steps grow linearly from batch.ramp_from to full size; 0: all steps have full size",
        min=0,
    )
    ramp_from: int = setting(
        0, "with batch.ramp_tokens: size of the first step, in the unit of the full size (sequences or tokens)", min=0
    )
    token_budget: int = setting(
        4096,
        "tokens in a bin (the micro-batch of a device). A larger value needs more memory and runs faster; results "
        "differ only by their dropout masks. 0: in fine-tuning, enough for most steps of the data",
        min=0,
    )
    policy: PolicyName = setting(
        "budget",
        "how the examples of a step are divided into bins. budget: equal tokens and attention; for comparison, padded: "
        "each example padded to max_seq_length; bins: a fixed mix of lengths in each bin; exchange: sorted by length, "
        "dealt in snake order; packed: rows of max_seq_length",
        experimental=True,
    )
    group_size: int = setting(
        0,
        "policy exchange: ranks in a group that shares examples; divides all ranks; 0: one group",
        min=0,
        experimental=True,
    )
    packing: StepPacking = setting(PACKING, "policy packed: longest or shortest pack first", experimental=True)
    shares: str = setting(
        "",
        "how many examples come from each quarter of the lengths, such as 6 3 2 5 in every 16 examples of a step; each "
        "quarter has its own order; empty: lengths as they come",
        experimental=True,
    )
    auto: bool = changeable(
        False, "set token_budget to the largest value that fits into memory, at most a rank's share of a step"
    )
    bin_sequences: int = setting(
        0, "most examples in a bin; 0: 1.5 times what fits on average", min=0, experimental=True
    )

    def without_ramp(self) -> BatchSettings:
        """These settings with steps of full size from the first on."""
        return replace(self, ramp_tokens=0, ramp_from=0)


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """The optimizer and gradient clipping."""

    name: Literal["lamb", "adamw", "stableadamw", "muon", "madgrad", "acclip"] = setting(
        "lamb",
        "the optimizer. stableadamw: adamw with smaller steps for tensors whose gradients suddenly grow; muon: muon "
        "for the matrices of the encoder layers, adamw for the rest",
    )
    learning_rate: float = setting(
        4e-4, "base learning rate; -1: in fine-tuning, chosen by the width of the model", min=-1
    )
    beta1: float = setting(
        0.9,
        "decay of the first moment; madgrad: momentum; muon: of its adamw part; the momentum of its matrices is "
        "(1 + beta1) / 2, by default 0.95",
        min=0,
        max=0.999999,
    )
    beta2: float = setting(
        0.999,
        "decay of the second moment, and of acclip's clipping threshold; madgrad: unused; muon: of its adamw part",
        min=0,
        max=0.999999,
    )
    epsilon: float = setting(1e-6, "added to the square root (madgrad: cube root) of the second moment", min=1e-12)
    weight_decay: float = setting(0.01, "decoupled weight decay; not applied to biases and LayerNorm", min=0)
    clip_norm: float = setting(1.0, "clip gradients to this norm; 0: no clipping", min=0)
    clipping: Literal["global", "local", "bucket"] = setting(
        "global",
        "which gradient is clipped. global: the sum over all ranks; local: each rank's gradient before the sum; "
        "bucket: each bucket of a rank's gradient, to clip_norm / sqrt(buckets). With local and bucket the result "
        "depends on the number of ranks",
    )
    layer_decay: float = setting(
        1.0, "learning rate of a layer as a multiple of that of the layer above, from the heads down", min=0.01, max=1
    )
    frozen_layers: int = setting(0, "freeze the embeddings and the first N layers; 0: train everything", min=0)
    sharded: bool = changeable(False, "shard the optimizer state over the ranks (as ZeRO stage 1)")


@dataclass(frozen=True, kw_only=True)
class ScheduleSettings:
    """Learning-rate schedule: linear warm-up, the base rate if the decay starts later, then decay."""

    warmup_steps: int = setting(0, "steps of linear warm-up", min=0)
    warmup_share: float = setting(
        0.0, "warm-up as a share of train.max_steps, then the decay; 0: use warmup_steps", min=0, max=0.99
    )
    start_warmup_step: int = setting(
        0, "step at which the warm-up line is 0; negative: training starts part of the way up", max=0
    )
    decay: Literal["polynomial", "linear", "square-root", "1-sqrt", "cosine", "constant"] = setting(
        "polynomial",
        "factor of the learning rate after a share s of the decay. polynomial: (1 - s) ^ power; linear: 1 - s; "
        "square-root: sqrt(1 - s); 1-sqrt: 1 - sqrt(s); cosine: (1 + cos(pi s)) / 2; constant: 1",
    )
    decay_start: int = setting(
        0,
        "step from which the decay counts; the base rate holds until then. 0: as in MLPerf's reference, where the rate "
        "drops onto the decay curve when the warm-up ends. To avoid the drop, set the last step of the warm-up",
        min=0,
    )
    decay_share: float = setting(
        0.0,
        "decay over this last share of train.max_steps, and hold the base rate until then (warm-up, stable, decay: "
        "WSD); 0: use decay_start",
        min=0,
        max=1,
    )
    decay_steps: int = setting(0, "step at which the decay ends; 0: train.max_steps", min=0)
    power: float = setting(1.0, "exponent of the polynomial decay", min=0)
    floor: float = setting(0.0, "learning rate at the end of the decay, as a share of the base rate", min=0, max=1)


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """Length, precision and hardware of the run."""

    max_steps: int = setting(1000, "optimizer steps", min=1)
    epochs: float = setting(0.0, "passes over the data; sets max_steps; 0: use max_steps", min=0)
    max_samples: int = changeable(0, "stop after this many examples, unless max_steps comes first; 0: no limit", min=0)
    max_time: str = changeable(
        "", "stop after this training time, such as 1h30m, unless max_steps comes first; empty: no limit"
    )
    budget: str = setting(
        "",
        "time for the whole schedule, such as 20m. The last step is fitted to the measured speed, repeatedly; "
        "evaluations take at most 5 % of the time. With epochs, whichever ends first; empty: use max_steps",
    )
    fits: str = setting(
        "",
        "the last step as fitted to the budget, such as 4:1530,25:1490: after step 25 it is 1490. A run with a budget "
        "adds to this list. Without a budget, the list replaces max_steps, to repeat such a run",
    )
    skip_steps: str = changeable("", "steps to skip with their examples, such as 1200-1210,1300; the first step is 1")
    seed: int = setting(
        1, "seed of example order, masks, dropout and initial weights; -1: draw one at the start", min=-1
    )
    device: Device = changeable("auto", "device to train on; auto: a GPU if there is one")
    precision: Literal["auto", "fp32", "tf32", "bf32", "bf16", "fp16", "fp8"] = setting(
        "fp32",
        "precision of matrix products; weights and sums stay fp32. auto: bf16 where the hardware supports it (GPUs, "
        "CPUs with AMX), else fp32; tf32: GPUs; bf32: fp32 tensors multiplied in bf16 (CPUs with AMX); fp16: with "
        "dynamic loss scaling (GPUs, CPUs with instructions for it); fp8: NVIDIA GPUs from Ada on",
    )
    isa: Literal["auto", "avx2", "avx512", "amx"] = changeable(
        "auto", "newest instruction set for matrix products on a CPU; auto: the newest that it has"
    )
    activation_checkpointing: Literal["none", "selective", "full"] = changeable(
        "none",
        "activations that the backward pass recomputes to save memory. selective: the cheap ones (GELU, dropout, "
        "LayerNorm, attention probabilities); full: all but each layer's input. Gradients stay the same",
    )
    kernels: Kernels = changeable(
        "auto",
        "the engine that computes a step. fused: bertrain's kernels (Triton on a GPU, AMX on a CPU); compiled: "
        "torch.compile with PyTorch's attention, on any CUDA GPU, and on a CPU if asked for; compiled-flash, "
        "compiled-efficient and compiled-grouped: with that attention instead of the fastest; plain: PyTorch alone; "
        "auto: the first of fused, compiled and plain that works",
    )
    deterministic: bool = setting(
        False, "make a run that is killed and resumed bitwise equal to an uninterrupted one; slower"
    )
    threads: int = changeable(0, "CPU threads per rank; 0: the cores divided by the ranks of this machine", min=0)
    binding: Literal["none", "auto"] = changeable(
        "auto",
        "pin each rank to cores. auto: those closest to its GPU, or an equal share, of one NUMA node if possible; "
        "none: not pinned",
    )
    backend: Literal["auto", "gloo", "nccl", "mpi", "ccl"] = changeable(
        "auto",
        "torch.distributed backend. auto: nccl where each rank has a GPU, else gloo; mpi, ccl: if PyTorch has them",
    )
    allocator: Literal["auto", "jemalloc", "tcmalloc", "system"] = changeable(
        "auto",
        "memory allocator on a CPU, loaded when the command starts. auto: jemalloc or tcmalloc if installed, else the "
        "system's, tuned to keep the memory of a step for the next one",
    )
    openmp: Literal["auto", "intel", "gnu"] = changeable(
        "auto", "OpenMP runtime on a CPU. auto, gnu: PyTorch's own; intel: Intel's or LLVM's, if installed"
    )
    exchange_precision: Literal["fp32", "bf16", "fp16"] = setting(
        "fp32",
        "format in which ranks send gradients. bf16: half the bytes; fp16: the same, but more exact, with precision "
        "fp16; sums are computed in fp32 and rounded once",
        experimental=True,
    )
    bucket_mb: int = setting(
        25, "size of a bucket of gradients that is all-reduced at once, in MB of fp32", min=1, experimental=True
    )
    hang_timeout: str = changeable(
        "10m",
        "stop the run and name the rank that hangs if no rank makes progress for this long; at least 10m while "
        "starting and saving; empty: wait forever",
    )
    init_optimizer: Literal["reset", "keep"] = setting(
        "reset", "with --init RUN: optimizer state. reset: zero moments; keep: the moments of that run"
    )
    init_progress: Literal["reset", "keep"] = setting(
        "reset",
        "with --init RUN: step and position in the data. reset: start at the first; keep: continue from that run, as "
        "`bertrain anneal` does",
    )
    init_positions: Literal["same", "extend"] = setting(
        "same",
        "with --init: number of position embeddings. same: as in the weights; extend: initialize the missing ones",
    )
    max_skipped_steps: int = changeable(
        10, "stop after this many steps in a row without a finite loss and gradient; such steps are not applied", min=1
    )

    def last_step(self) -> int | None:
        """The last step of the run as far as it is known; None until train.budget alone is first fitted."""
        fits = parse_fits(self.fits, "train.fits")
        return fits[-1][1] if fits else None if self.budget and not self.epochs else self.max_steps


@dataclass(frozen=True, kw_only=True)
class EvaluateSettings:
    """Held-out loss and accuracy during the run."""

    data: str = changeable("", "prepared folder to evaluate on; empty: no evaluation during pre-training")
    rule: Literal["every", "mlperf"] = changeable(
        "every",
        "interval between evaluations. every: every_samples; mlperf: 0.05 (230.23 B + 3,000,000) examples, rounded "
        "down to a multiple of 25,000, where B is mlperf.global_batch_size or else batch.sequences",
    )
    every_samples: int = changeable(0, "evaluate every N training examples; 0: only at the end", min=0)
    every_epochs: float = changeable(0.0, "fine-tuning: evaluate every N epochs; 0: use every_samples", min=0)
    batch_size: int = changeable(
        0, "fine-tuning: evaluation batch size; latency is reported per batch; 0: a large one", min=0
    )
    target_accuracy: float = changeable(
        0.0,
        "stop once the masked-word accuracy or the task's main metric reaches this (0 to 1; SQuAD: 0 to 100); 0: never",
        min=0,
        max=100,
    )
    max_examples: int = changeable(
        2000, "pre-training: examples to evaluate on, evenly spaced; 0: all. Tasks always use all", min=0
    )


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """When to save, and which checkpoints to keep."""

    enabled: bool = changeable(True, "save checkpoints; false: none, not even at the end")
    every_steps: int = changeable(500, "save every N steps, and always at the end; 0: not by steps", min=0)
    every_samples: int = changeable(0, "save every N training examples; 0: not by examples", min=0)
    every_minutes: float = changeable(0.0, "save every N minutes; 0: not by time", min=0)
    first_after_samples: int = changeable(
        0, "save nothing before this many training examples, except at the end; 0: from the start", min=0
    )
    keep_best: bool = changeable(
        False,
        "also save and keep the checkpoint with the best masked-word accuracy or main metric of the task; a fine-tuned "
        "run then reports the metrics of that checkpoint",
    )
    keep: int = changeable(3, "number of checkpoints to keep; at least 2, since the newest may be damaged", min=2)


@dataclass(frozen=True, kw_only=True)
class LogSettings:
    """What the console and the logs show. metrics.jsonl always holds every step."""

    every_steps: int = changeable(10, "steps between two console lines", min=1)
    level: Literal["quiet", "normal", "verbose"] = changeable("normal", "how much the console shows")
    style: Literal["auto", "bar", "lines"] = changeable("auto", "progress bar or lines; auto: a bar on a terminal")
    straggler_factor: float = changeable(
        1.3, "warn about a rank whose time per token is this many times the median of all ranks; 0: never", min=0
    )
    trackers: str = changeable(
        "auto",
        "programs that receive settings and metrics, such as tensorboard,mlflow,wandb; auto: TensorBoard events in "
        "the run folder, if TensorBoard is installed; none: no program",
        is_list=True,
    )
    telemetry: bool = changeable(False, "sample clocks, power, temperature, memory and energy into telemetry.csv")
    telemetry_ms: int = changeable(100, "milliseconds between two samples of telemetry", min=10, max=60_000)

    def tracker_names(self) -> list[str]:
        """The trackers of `trackers`; raises UserError for one that is unknown."""
        if self.trackers in ("auto", "none", ""):
            return ["tensorboard"] if self.trackers == "auto" else []
        names = [name.strip() for name in self.trackers.split(",")]
        for name in names:
            if name not in TRACKERS or names.count(name) > 1:
                choices = f"auto, none, or a list of {', '.join(TRACKERS)}, each once"
                raise UserError("invalid-value", f"log.trackers is {self.trackers!r}; give {choices}")
        return names


@dataclass(frozen=True, kw_only=True)
class MlperfSettings:
    """Settings of `bertrain mlperf run`: entries of its logs, and the check of the initial weights."""

    division: Literal["closed", "open"] = changeable("open", "division in the logs")
    organization: str = changeable("unknown", "organization in the logs")
    platform: str = changeable("", "platform in the logs; empty: device of rank 0 and number of ranks")
    status: Literal["onprem", "cloud", "research"] = changeable("research", "availability in the logs")
    global_batch_size: int = changeable(
        0, "nominal sequences in a step, if batch.tokens lets their number vary; 0: batch.sequences", min=0
    )
    clear_cache: bool = changeable(True, "drop the page cache before each experiment, where that is permitted")
    probe_accuracy: float = changeable(
        0.0, "masked-word accuracy that the weights of --init must have; 0: do not check", min=0, max=1
    )
    probe_tolerance: float = changeable(0.002, "largest accepted difference from probe_accuracy", min=0, max=1)
