"""Records to tokens to training sequences, without torch.

sources (which files) -> records (documents and faults) -> preparation (parallel, resumable)
  -> store (.bin/.idx and meta.json) -> rows -> sampler (sequence n as a pure function of data, seed and n) -> batches
"""

from __future__ import annotations

from kumi.data.batches import BatchSource, MixtureSource
from kumi.data.binfile import IndexedFile
from kumi.data.preparation import TOKENIZER, TOKENS, foreign_files, prepare
from kumi.data.records import Fault, Record, read
from kumi.data.row_source import Batch, RowSource
from kumi.data.sampler import Mixture, SequentialSampler
from kumi.data.sources import DataPathError, expand, would_read
from kumi.data.store import Store, inspect, open_store
from kumi.data.stored_source import StoredSource
from kumi.data.tokenizer import Tokenizer
from kumi.data.tokenizer import load as load_tokenizer
from kumi.spec.data_source import Source

__all__ = [
    "TOKENIZER",
    "TOKENS",
    "Batch",
    "BatchSource",
    "DataPathError",
    "Fault",
    "IndexedFile",
    "Mixture",
    "MixtureSource",
    "Record",
    "RowSource",
    "SequentialSampler",
    "Source",
    "Store",
    "StoredSource",
    "Tokenizer",
    "expand",
    "foreign_files",
    "inspect",
    "load_tokenizer",
    "open_store",
    "prepare",
    "read",
    "would_read",
]
