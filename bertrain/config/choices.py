"""Literal types of options and settings. Nothing heavy is imported here, so that the command line stays fast."""

from __future__ import annotations

from typing import Literal

Form = Literal["auto", "dump", "wikiextractor", "jsonl", "csv", "parquet", "arrow", "text"]
"""Input formats of `data extract`; auto: detected from the content."""
DocumentEnd = Literal["auto", "blank-line", "file", "line", "size"]
"""Where a document of plain text ends; size: at the first blank line after 8 kB; auto: as the text looks."""
Splitter = Literal["sentencex", "lines", "none"]
OnError = Literal["stop", "skip"]
Engine = Literal["local", "dask"]
Collection = Literal["wikipedia", "mlperf"]  # collections that `data download` knows
StepPacking = Literal["lpfhp", "spfhp"]  # packing algorithms of the policy `packed`, which packs each step by itself
Algorithm = Literal[StepPacking, "nnlshp"]
"""Packing algorithms of `data pack` and `data convert`, which pack a whole data set once."""
PACKING: StepPacking = "lpfhp"  # the default algorithm of packed rows
MAX_PER_ROW = 3  # the default limit of sequences in a packed row
MASK_PROBABILITY = 0.15  # default share of tokens to predict, as BERT was trained
MODERN_MASK_PROBABILITY = 0.3  # ModernBERT's; BERT, too, learns more with it in equal time: benchmarks/masking.py
Target = Literal["arrow", "hdf5-fixed", "hdf5-varlength", "hdf5-packed", "hdf5-per-length", "tfrecord"]
"""Formats that `data convert` writes."""
PolicyName = Literal["budget", "padded", "bins", "exchange", "packed"]
"""Policies that deal the examples of a step into bins."""
Family = Literal["bert", "modern"]
"""Architectures of the encoder (`model/families.py`)."""
Size = Literal["auto", "tiny", "mini", "small", "medium", "base", "large"]
"""Sizes of `bertrain train`; auto: the largest that learns enough in the budget."""
Pooling = Literal["mean", "cls", "max"]
"""How one vector of a text is made of those of its tokens."""
EmbeddingPrecision = Literal["auto", "fp32", "tf32", "bf32", "bf16", "fp16"]
TRACKERS = ("tensorboard", "mlflow", "wandb")  # of log.trackers
Device = Literal["auto", "cpu", "cuda"]
"""Where a model computes; auto: a GPU if there is one."""
EngineName = Literal["fused", "compiled", "plain"]
"""The engines that compute a step (`training/engine.py`), fastest first."""
Kernels = Literal["auto", EngineName, "compiled-flash", "compiled-efficient", "compiled-grouped"]
"""Choices of `train.kernels`: an engine, the compiled one also with its attention."""
