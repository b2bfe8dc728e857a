"""Losses of plain-text rows on kumi's own path: its tokens, packed rows, objectives and models from HF folders."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch

from kumi.convert import weights_reader
from kumi.data import SequentialSampler, tokenizer
from kumi.data.chat.encode import ConversationEncoder
from kumi.data.chat.sandbox import Renderer
from kumi.data.chat.template import ChatTemplate
from kumi.data.encode_rows import to_arrays
from kumi.data.formats import detect, to_example
from kumi.data.packing import PackedRows, pack, positions_of
from kumi.objectives import LM_ROWS, MISMATCHED
from kumi.parallel import build
from kumi.parallel.run_microbatches import forward_backward, shard_batch, sum_sequences
from kumi.spec import families
from kumi.spec.data_source import Source
from kumi.spec.layout import Layout
from kumi.spec.precision import PRECISIONS
from memory_units import MemoryUnits
from steps import mesh_of

SEQ_LEN = 64


@dataclass
class TextUnits(MemoryUnits):
    """Units made from rows; `records` has their labels and margins."""

    records: np.ndarray | None = None

    @property
    def columns(self):
        return self.records


@cache
def _encoder(folder):
    template = ChatTemplate("{{ messages }}", "none", hashlib.sha256(b"").hexdigest())
    return ConversationEncoder(Renderer(template, {}), tokenizer.load(folder), ("<eos>",))


def read_units(folder: Path, rows):
    """Return the units of `rows`, tokenised by the tokenizer of `folder`."""
    form = detect(rows, Source("rows"))
    examples = [to_example(form, row, "rows", number) for number, row in enumerate(rows)]
    encoded = [unit for example in examples for unit in _encoder(folder).encode(example)]
    _, records = to_arrays(encoded, [0] * len(encoded), np.dtype(np.uint16))
    records["first_document"] = np.cumsum(records["documents"]) - records["documents"]
    sequences = [
        [
            (np.array(s.ids, np.uint16), np.array(s.mask, np.uint8), np.ones(len(s.ids), np.float32))
            for s in unit.sequences
        ]
        for unit in encoded
    ]
    return TextUnits(Path("rows"), sequences, form.kind, records=records)


def make_batch(units, form=LM_ROWS, seq_len=SEQ_LEN):
    """Return all units in packed rows, as a batch of tensors."""
    rows = PackedRows(units, pack(positions_of(units, form), seq_len, 1), seq_len, form)
    assert rows.units == len(units.records), "a unit is longer than a row"
    return {name: torch.from_numpy(x) for name, x in SequentialSampler([rows], seq_len).batch(0, rows.rows).items()}


def load_model(folder: Path, precision="fp32"):
    """Return kumi's model of an HF folder, by default in float32."""
    spec = families.from_hf(families.read_config(folder))
    return build(spec, mesh_of(Layout()), PRECISIONS[precision], weights=weights_reader(folder, spec))


def add_reference(objective, batch, reference):
    """Return `batch` with the log-probs of the model `reference`."""
    mesh = mesh_of(Layout())
    sharded = [shard_batch(objective, batch, mesh)]
    prefixes = ("", MISMATCHED) if objective.rows.mismatched else ("",)
    columns = {f"{prefix}reference": sum_sequences(reference, mesh, sharded, prefix)[0] for prefix in prefixes}
    return {**batch, **columns}


def add_gradients(model, objective, batch, microbatches=1):
    """Add the gradients of `batch` to those of `model`, and return its loss."""
    mesh, numbers = mesh_of(Layout()), torch.arange(len(batch["labels"])).chunk(microbatches)
    parts = [{name: column[part] for name, column in batch.items()} for part in numbers]
    return forward_backward(model, mesh, objective, parts, objective.count(batch)).item()
