"""The choices that options leave, by name. Nothing heavy is imported here, so the command line can take them too."""

from __future__ import annotations

from typing import Literal

Form = Literal["auto", "dump", "wikiextractor", "jsonl", "parquet", "text"]
"""What an input of `data extract` is; auto: as its content says."""
DocumentEnd = Literal["blank-line", "file"]
Splitter = Literal["sentencex", "lines", "none"]
OnError = Literal["stop", "skip"]
Engine = Literal["local", "dask"]
Collection = Literal["wikipedia", "mlperf"]
"""What there is to download."""
Algorithm = Literal["lpfhp", "spfhp", "nnlshp"]
PACKING: Algorithm = "lpfhp"
MAX_PER_ROW = 3
"""How sequences are packed into rows."""
Target = Literal["arrow", "hdf5-fixed", "hdf5-varlength", "hdf5-packed", "hdf5-per-length", "tfrecord"]
"""The layouts that are written."""
PolicyName = Literal["budget", "padded", "bins", "exchange", "packed"]
"""How a step is dealt into bins."""
