"""The trained model's own logits on a few tokens, kept so that an export can be compared with them."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from kumi.parallel import context, pipeline
from kumi.parallel.data import release
from kumi.spec.layout import AXES
from kumi.train.state import Parts
from kumi.train.step import to_device

FILE = "probe.safetensors"
ROWS, LENGTH = 3, 32


@torch.no_grad()
def write_probe(parts: Parts, out: Path) -> None:
    """One rank, the first of those with the head, writes input ids (3, S) and the trained model's float32 logits
    (3, S, V) to `out`/probe.safetensors."""
    batch = parts.data.batch(0, ROWS)
    input_ids: Tensor = to_device(batch, parts.mesh.device)["input_ids"][:, :LENGTH].contiguous()
    parts.model.eval()
    with context.whole_sequences(parts.model):
        found = pipeline.forward(parts.model, parts.mesh, [{"input_ids": input_ids}])
    parts.model.train()
    release(parts.model)
    if found and all(parts.mesh.index(name) == 0 for name in AXES if name != "pp"):
        tensors = {"input_ids": input_ids.cpu(), "logits": found[0].float().cpu().contiguous()}
        try:
            save_file(tensors, out / FILE)
        except SafetensorError as error:
            raise OSError(f"{out / FILE}: {error}") from error
