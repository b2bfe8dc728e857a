"""Records to tokens to training sequences, without torch.

sources (which files) -> records (documents and faults) -> prepare (parallel, resumable) -> store (.bin/.idx +
meta.json)
  -> mix (sequence n as a pure function of data, seed and n)
"""

from __future__ import annotations

from kumi.data.binfile import IndexedFile
from kumi.data.mix import Batch, Mixture, Sweep
from kumi.data.records import Fault, Record, read
from kumi.data.sources import DataPathError, Source, expand
from kumi.data.store import Store, StoredSource, inspect, open_store
from kumi.data.tokenizer import Tokenizer

__all__ = [
    "Batch",
    "DataPathError",
    "Fault",
    "IndexedFile",
    "Mixture",
    "Record",
    "Source",
    "Store",
    "StoredSource",
    "Sweep",
    "Tokenizer",
    "expand",
    "inspect",
    "open_store",
    "read",
]
