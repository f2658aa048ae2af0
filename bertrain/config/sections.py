"""The sections of a run's settings: every one typed, with its help beside it.

`settings.py` holds them together, and says what they must agree on among themselves.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from bertrain.base.errors import UserError
from bertrain.base.units import parse_slice
from bertrain.config.choices import MASK_PROBABILITY, PACKING, PolicyName, StepPacking


def setting(
    default: Any,
    help: str,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    shapes_training: bool = True,
) -> Any:
    """A dataclass field with its help, its inclusive range, and whether another value is another training."""
    metadata = {"help": help, "minimum": minimum, "maximum": maximum, "shapes_training": shapes_training}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """What the network is. The defaults are BERT-Base, uncased."""

    config: str = setting("", "a bert_config.json that describes the model; settings given beside it win")
    vocab_size: int = setting(30522, "words in the vocabulary", minimum=6)
    hidden_size: int = setting(768, "width of the encoder", minimum=1)
    num_layers: int = setting(12, "encoder layers", minimum=1)
    num_heads: int = setting(12, "attention heads; must divide hidden_size", minimum=1)
    intermediate_size: int = setting(3072, "width of the feed-forward layer", minimum=1)
    max_positions: int = setting(512, "longest sequence the position embeddings can hold", minimum=3)
    num_segments: int = setting(2, "segment (token type) embeddings", minimum=2)
    hidden_dropout: float = setting(0.1, "dropout after embeddings and each dense layer", minimum=0, maximum=0.99)
    attention_dropout: float = setting(0.1, "dropout on attention probabilities", minimum=0, maximum=0.99)
    initializer_range: float = setting(0.02, "deviation of the truncated normal for weights", minimum=0)
    initial_heads: Literal["random", "neighbours"] = setting(
        "random",
        "how a fresh model begins. random: as BERT; neighbours: heads of the first layer begin by looking at the words "
        "next to theirs, which saves the first millions of tokens",
    )
    layer_norm_eps: float = setting(1e-12, "epsilon inside LayerNorm", minimum=0)
    nsp: bool = setting(True, "train next-sentence prediction beside masked words")
    head: Literal["pretrain", "classify", "regress", "span"] = setting(
        "pretrain",
        "what is asked of the encoder. pretrain: masked words and next sentences; classify, regress: a class or a "
        "number for each text; span: where in the text an answer begins and ends",
    )
    num_labels: int = setting(2, "classify: how many classes there are", minimum=2)
    head_dropout: float = setting(0.1, "classify, regress: dropout before the last layer", minimum=0, maximum=0.99)
    pad_vocab_to: Literal[1, 8, 64] = setting(
        1, "pad the vocabulary's rows to a multiple of this (tensor cores like 8 or 64); no word is added"
    )

    @property
    def padded_vocab_size(self) -> int:
        return -(-self.vocab_size // self.pad_vocab_to) * self.pad_vocab_to

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads

    def check(self) -> ModelSettings:
        """Refuse a model that cannot be built; returns itself."""
        if self.hidden_size % self.num_heads:
            raise UserError(
                f"model.hidden_size {self.hidden_size} is not a multiple of model.num_heads {self.num_heads}"
            )
        return self


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """How examples become model input. The folder itself is `--data`."""

    max_seq_length: int = setting(128, "longest example, [CLS] and [SEP] included", minimum=5)
    max_predictions: int = setting(20, "most masked words in one example", minimum=1)
    mask_probability: float = setting(
        MASK_PROBABILITY, "share of an example's tokens to predict", minimum=0.001, maximum=0.5
    )
    whole_word: bool = setting(False, "mask whole words instead of single word pieces")
    slice: str = setting("", "the part of the rows to train on, in their order on disk, such as 0:0.9; empty: all")
    vocab: str = setting(
        "",
        "vocabulary of HDF5 or TFRecord data; empty: the vocab.txt beside it, or BERT's uncased one",
        shapes_training=False,
    )
    verify: Literal["hash", "size"] = setting(
        "hash",
        "check each shard's SHA-256 at the start, or only its size (quicker on a terabyte)",
        shapes_training=False,
    )

    def rows(self, num_rows: int) -> range:
        """The rows that `slice` leaves of so many: 0:0.9 and 0.9:1 have none in common and miss none."""
        begin, end = parse_slice(self.slice)
        return range(int(begin * num_rows), int(end * num_rows))


@dataclass(frozen=True, kw_only=True)
class TaskSettings:
    """What a model is fine-tuned for. Files lie in the folder `--data`."""

    name: str = setting("", "the task, such as glue/mnli, squad/v2.0, xnli or classify; empty: pre-training")
    on_error: Literal["stop", "skip"] = setting(
        "stop", "a damaged row of the data. stop: refuse the file, naming its line; skip: pass over it, and count"
    )
    text: str = setting("text", "classify: the column with the text")
    text_pair: str = setting("", "classify: the column with a second text; empty: there is none")
    label: str = setting("label", "classify: the column with the label")
    target: Literal["class", "number"] = setting("class", "classify: whether a label is one of several, or a number")
    languages: str = setting(
        "all", "xnli: the languages to score, such as de,fr; all of those in the file", shapes_training=False
    )
    doc_stride: int = setting(128, "squad: tokens from one window of a long text to the next", minimum=1)
    max_query_length: int = setting(64, "squad: a question is cut off after so many tokens", minimum=1)
    max_answer_length: int = setting(
        30, "squad: the longest answer in tokens that is given", minimum=1, shapes_training=False
    )
    n_best: int = setting(20, "squad: candidates that are kept for each question", minimum=1, shapes_training=False)
    null_threshold: float = setting(
        0.0,
        "squad/v2.0: no answer is given where the score of none exceeds the best answer's by more than this",
        shapes_training=False,
    )


@dataclass(frozen=True, kw_only=True)
class BatchSettings:
    """What one optimizer step consumes, and how much of it a device computes at once."""

    sequences: int = setting(0, "examples in a step; 0: measured in tokens", minimum=0)
    tokens: int = setting(0, "real tokens in a step, at the most; 0: measured in sequences", minimum=0)
    token_budget: int = setting(
        4096,
        "tokens a device computes at once (a bin): memory and speed; only dropout draws depend on it. 0, for "
        "fine-tuning: what most steps of the data need",
        minimum=0,
    )
    policy: PolicyName = setting(
        "budget",
        "budget: bins of whole examples, evenly filled; padded: each example padded to max_seq_length; bins: an equal "
        "share of short and long ones to each; exchange: sorted, dealt in snake order; packed: by rows of "
        "max_seq_length",
    )
    group_size: int = setting(
        0, "exchange: ranks whose bins are dealt together; it divides their number; 0: all bins of a step", minimum=0
    )
    packing: StepPacking = setting(PACKING, "packed: rows by longest pack first or shortest pack first")
    auto: bool = setting(
        False,
        "find the largest token_budget that the device's memory holds, up to a rank's share of a step, and use that",
        shapes_training=False,
    )
    bin_sequences: int = setting(0, "most examples in a bin; 0: half as many again as fit on average", minimum=0)


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """The update rule and its clipping."""

    name: Literal["lamb", "adamw", "madgrad", "acclip"] = setting("lamb", "update rule")
    learning_rate: float = setting(4e-4, "base learning rate, scaled by the schedule", minimum=0)
    beta1: float = setting(0.9, "decay of the first moment; madgrad: its momentum", minimum=0, maximum=0.999999)
    beta2: float = setting(
        0.999,
        "decay of the second moment; acclip: of its clip level too; madgrad has none",
        minimum=0,
        maximum=0.999999,
    )
    epsilon: float = setting(1e-6, "added to the root of the second moment; madgrad: to its cube root", minimum=1e-12)
    weight_decay: float = setting(0.01, "decoupled decay; biases and LayerNorm are left out", minimum=0)
    clip_norm: float = setting(1.0, "clip gradients to this norm; 0: never", minimum=0)
    clipping: Literal["global", "local", "bucket"] = setting(
        "global",
        "what is clipped. global: the sum over all ranks; local: each rank's share before it is sent; bucket: each "
        "bucket of a rank's share, to clip_norm / sqrt(buckets), as soon as it is ready. The last two depend on the "
        "number of ranks",
    )
    layer_decay: float = setting(
        1.0,
        "the rate of each layer is that of the layer above it times this; the heads have the full rate",
        minimum=0.01,
        maximum=1,
    )
    frozen_layers: int = setting(
        0, "the embeddings and this many of the first layers stay as they are; 0: everything is trained", minimum=0
    )
    sharded: bool = setting(
        False, "each rank keeps and updates one share of the optimizer's state", shapes_training=False
    )


@dataclass(frozen=True, kw_only=True)
class ScheduleSettings:
    """Linear warm-up, then decay."""

    warmup_steps: int = setting(0, "length of the linear warm-up", minimum=0)
    warmup_share: float = setting(
        0.0,
        "the same as a share of train.max_steps, with a decay that counts from the end of the warm-up; 0: by steps",
        minimum=0,
        maximum=0.99,
    )
    start_warmup_step: int = setting(0, "where the warm-up line starts; negative: it begins part way up", maximum=0)
    decay: Literal["polynomial", "linear", "square-root", "cosine", "constant"] = setting(
        "polynomial",
        "how the rate falls with the share s of the decay done. polynomial: (1 - s) ^ power; linear: 1 - s; "
        "square-root: sqrt(1 - s); cosine: (1 + cos(pi s)) / 2; constant: not at all",
    )
    decay_start: int = setting(
        0,
        "step that the decay counts from; the base rate until then. 0: as in MLPerf's reference, the rate jumps down "
        "onto the decay when the warm-up ends; the step at which it ends: no jump",
        minimum=0,
    )
    decay_steps: int = setting(0, "step at which the decay ends; 0: train.max_steps", minimum=0)
    power: float = setting(1.0, "exponent of the polynomial decay", minimum=0)
    floor: float = setting(0.0, "share of the base rate that the decay ends at, and stays at", minimum=0, maximum=1)

    def check(self) -> ScheduleSettings:
        """Refuse a decay that contradicts itself; returns itself."""
        if self.warmup_share and (self.warmup_steps or self.start_warmup_step or self.decay_start):
            raise UserError(
                "schedule.warmup_share says where the warm-up ends and the decay begins; leave warmup_steps, "
                "start_warmup_step and decay_start out"
            )
        warmup_end = self.warmup_steps + self.start_warmup_step
        if 0 < self.decay_steps < warmup_end:
            raise UserError(
                f"the warm-up ends at step {warmup_end}, after schedule.decay_steps {self.decay_steps}, "
                "where the decay has ended"
            )
        if 0 < self.decay_steps <= self.decay_start:
            raise UserError(
                f"schedule.decay_steps {self.decay_steps} is where the decay ends, and schedule.decay_start "
                f"{self.decay_start} where it begins; make the first the larger one"
            )
        if self.decay == "constant":
            for name in ("decay_start", "decay_steps", "floor"):
                if getattr(self, name):
                    raise UserError(
                        f"schedule.{name} {getattr(self, name)} is for a rate that falls, and schedule.decay is "
                        f"constant; set --schedule.{name} 0 or another decay"
                    )
        exponent = {"polynomial": self.power, "square-root": 0.5}.get(self.decay, 1.0)
        if self.power not in (1.0, exponent):
            raise UserError(
                f"schedule.power {self.power} is for schedule.decay polynomial, and the decay is {self.decay}; "
                "set --schedule.power 1 beside it"
            )
        return self


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """The run as a whole."""

    max_steps: int = setting(1000, "optimizer steps in the run", minimum=1)
    epochs: float = setting(
        0.0, "fine-tuning: passes over the data, which set max_steps when a run begins; 0: by max_steps", minimum=0
    )
    max_samples: int = setting(
        0, "end after this many examples, if that comes first; 0: never", minimum=0, shapes_training=False
    )
    max_time: str = setting(
        "", "end after this much time of training, such as 20m or 1h30m, if that comes first", shapes_training=False
    )
    budget: str = setting(
        "",
        "measure the speed of the first steps, then set max_steps so that the run, its schedule included, ends after "
        "this much time, such as 20m",
    )
    skip_steps: str = setting(
        "", "steps whose examples are passed over, such as 1200-1210,1300; the first is 1", shapes_training=False
    )
    seed: int = setting(
        1,
        "the one seed; order, masks, dropout and weights are derived from it. -1: drawn from the system's entropy when "
        "the run begins",
        minimum=-1,
    )
    device: Literal["auto", "cpu", "cuda"] = setting("auto", "auto: a GPU if there is one", shapes_training=False)
    precision: Literal["auto", "fp32", "tf32", "bf32", "bf16", "fp16", "fp8"] = setting(
        "fp32",
        "of matrix products; weights and sums stay fp32. auto: bf16 where the hardware multiplies it (GPUs, CPUs with "
        "AMX), else fp32; tf32: fp32 tensors, products of 10-bit mantissas (GPUs); bf32: fp32 tensors, products in "
        "bf16 (CPUs with AMX); fp16: with dynamic loss scaling; fp8: Hopper GPUs and newer",
    )
    isa: Literal["auto", "avx2", "avx512", "amx"] = setting(
        "auto", "the newest instructions that products on a CPU may use; auto: all it has", shapes_training=False
    )
    activation_checkpointing: Literal["none", "selective", "full"] = setting(
        "none",
        "what the backward pass computes again instead of keeping it. selective: what is cheap (GELU, dropout, "
        "LayerNorm, attention probabilities); full: everything but each layer's input. The gradient is the same",
        shapes_training=False,
    )
    kernels: Literal["auto", "plain"] = setting(
        "auto",
        "auto: fused kernels where they can run (Triton's on a GPU, AMX's on a CPU); plain: PyTorch alone",
        shapes_training=False,
    )
    deterministic: bool = setting(False, "killed and resumed, the run ends bitwise equal to an undisturbed one")
    threads: int = setting(
        0, "CPU threads per rank; 0: the cores shared out among the local ranks", minimum=0, shapes_training=False
    )
    binding: Literal["none", "auto"] = setting(
        "auto",
        "which cores a rank keeps to. none: any; auto: those next to its GPU, or an even share of all, hyper-threads "
        "together, no rank on two NUMA nodes if it can be avoided",
        shapes_training=False,
    )
    backend: Literal["auto", "gloo", "nccl", "mpi", "ccl"] = setting(
        "auto",
        "who carries gradients between ranks. auto: nccl where each has a GPU of its own, else gloo; mpi, ccl (oneCCL) "
        "where PyTorch was built with them",
        shapes_training=False,
    )
    allocator: Literal["auto", "jemalloc", "tcmalloc", "system"] = setting(
        "auto",
        "who hands out memory on a CPU; loaded as the command begins. auto: jemalloc or tcmalloc, whichever is "
        "installed, else the system's, told to keep what a step gives back",
        shapes_training=False,
    )
    openmp: Literal["auto", "intel", "gnu"] = setting(
        "auto",
        "whose threads compute on a CPU. auto and gnu: those PyTorch came with; intel: Intel's or LLVM's runtime, "
        "where it is installed",
        shapes_training=False,
    )
    bucket_mb: int = setting(
        25, "gradients travel in buckets of about this many MB, each as soon as it is ready", minimum=1
    )
    hang_timeout: str = setting(
        "10m",
        "end the run, naming the rank that stopped, when none has moved for this long; starting and saving have ten "
        "minutes at least; empty: never",
        shapes_training=False,
    )
    init_optimizer: Literal["reset", "keep"] = setting(
        "reset", "with --init RUN: begin the optimizer's moments anew, or keep those of that run"
    )
    init_positions: Literal["same", "extend"] = setting(
        "same", "with --init: ask for as many positions, or take those there are and initialize the others"
    )
    max_skipped_steps: int = setting(
        10,
        "end the run after this many non-finite steps in a row, none of them applied",
        minimum=1,
        shapes_training=False,
    )


@dataclass(frozen=True, kw_only=True)
class EvaluateSettings:
    """Held-out loss and accuracy during the run."""

    data: str = setting(
        "", "prepared folder to evaluate on; empty: no evaluation during training", shapes_training=False
    )
    rule: Literal["every", "mlperf"] = setting(
        "every",
        "when. every: by every_samples; mlperf: every 0.05 (230.23 B + 3,000,000) examples, rounded down to a multiple "
        "of 25,000, B being mlperf.global_batch_size or else batch.sequences",
        shapes_training=False,
    )
    every_samples: int = setting(
        0, "evaluate each time this many examples were trained on; 0: at the end", minimum=0, shapes_training=False
    )
    every_epochs: float = setting(
        0.0,
        "fine-tuning: evaluate after so many passes over the data; 0: by every_samples",
        minimum=0,
        shapes_training=False,
    )
    at_once: int = setting(
        0,
        "fine-tuning: examples that are evaluated or predicted at once, of which latency is told; 0: as many as are "
        "fast",
        minimum=0,
        shapes_training=False,
    )
    target_accuracy: float = setting(
        0.0,
        "end the run once the masked-word accuracy (fine-tuning: the task's main figure) reaches this; 0: never",
        minimum=0,
        maximum=100,
        shapes_training=False,
    )
    max_examples: int = setting(
        10000,
        "pre-training: examples to evaluate on, evenly strided; 0: all. A task is scored on all of its held-out part",
        minimum=0,
        shapes_training=False,
    )


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """What is kept to go on from."""

    enabled: bool = setting(True, "false: save nothing at all, not even at the end", shapes_training=False)
    every_steps: int = setting(
        500, "save every so many steps, and always at the end; 0: not by steps", minimum=0, shapes_training=False
    )
    every_samples: int = setting(
        0, "save each time this many examples were trained on; 0: not by examples", minimum=0, shapes_training=False
    )
    every_minutes: float = setting(0.0, "save every so many minutes; 0: not by time", minimum=0, shapes_training=False)
    first_after_samples: int = setting(
        0, "save nothing before this many examples, but always at the end", minimum=0, shapes_training=False
    )
    keep_best: bool = setting(
        False,
        "save at each evaluation that is the best yet, by masked-word accuracy or a task's main figure, and keep it "
        "besides the newest; a fine-tuned run's figures are then the best's",
        shapes_training=False,
    )
    keep: int = setting(
        3, "whole checkpoints to keep; at least two, the newest may be the torn one", minimum=2, shapes_training=False
    )


@dataclass(frozen=True, kw_only=True)
class LogSettings:
    """What is said while it runs. metrics.jsonl always holds every step."""

    every_steps: int = setting(10, "a console line every so many steps", minimum=1, shapes_training=False)
    level: Literal["quiet", "normal", "verbose"] = setting("normal", "how much is said", shapes_training=False)
    style: Literal["auto", "bar", "lines"] = setting(
        "auto", "a live bar, or lines; auto: a bar on a terminal, lines elsewhere", shapes_training=False
    )
    straggler_factor: float = setting(
        1.3,
        "warn of a rank that takes this many times as long over a token as the ranks' median; 0: never",
        minimum=0,
        shapes_training=False,
    )
    tensorboard: bool = setting(True, "write TensorBoard events into the run folder", shapes_training=False)
    telemetry: bool = setting(
        False,
        "sample clocks, power, temperature, memory and energy of each rank's device into telemetry.csv",
        shapes_training=False,
    )
    telemetry_ms: int = setting(
        100, "milliseconds between two samples", minimum=10, maximum=60_000, shapes_training=False
    )


@dataclass(frozen=True, kw_only=True)
class MlperfSettings:
    """What `bertrain mlperf run` adds to a run: what its logs say of it, and the probe before the first experiment."""

    division: Literal["closed", "open"] = setting("open", "division that the logs name", shapes_training=False)
    organization: str = setting("unknown", "organization that the logs name", shapes_training=False)
    platform: str = setting(
        "", "platform that the logs name; empty: the first rank's device and the ranks", shapes_training=False
    )
    status: Literal["onprem", "cloud", "research"] = setting(
        "research", "availability that the logs name", shapes_training=False
    )
    global_batch_size: int = setting(
        0,
        "nominal sequences in a step, where batch.tokens lets their number vary; 0: batch.sequences",
        minimum=0,
        shapes_training=False,
    )
    clear_cache: bool = setting(
        True, "drop the page cache before each experiment, where that is permitted", shapes_training=False
    )
    probe_accuracy: float = setting(
        0.0,
        "masked-word accuracy that the weights of --init must have before any training; 0: they are not asked",
        minimum=0,
        maximum=1,
        shapes_training=False,
    )
    probe_tolerance: float = setting(
        0.002, "how far from probe_accuracy they may be", minimum=0, maximum=1, shapes_training=False
    )
