"""The trained model's own logits on a few tokens, kept so that an export can be compared with them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from kumi.data import Mixture
from kumi.parallel import context_parallel, pipeline
from kumi.parallel.data_parallel import release
from kumi.spec.layout import AXES
from kumi.train.train_state import Parts

FILE = "probe.safetensors"
ROWS, LENGTH = 3, 32


def probe_ids(mixture: Mixture) -> npt.NDArray[np.int64]:
    """Return the tokens (3, S) that the probe is made of: the beginnings of the first sequences of `mixture`."""
    return np.ascontiguousarray(mixture.batch(0, ROWS)["input_ids"][:, :LENGTH])


@torch.no_grad()
def write_probe(parts: Parts, out: Path) -> None:
    """One rank, the first of those with the head, writes input ids (3, S) and the trained model's float32 logits
    (3, S, V) to `out`/probe.safetensors."""
    input_ids: Tensor = torch.from_numpy(parts.probe_ids).to(parts.mesh.device)
    parts.model.eval()
    with context_parallel.whole_sequences(parts.model):
        found = pipeline.forward(parts.model, parts.mesh, [{"input_ids": input_ids}])
    parts.model.train()
    release(parts.model)
    if found and all(parts.mesh.index(name) == 0 for name in AXES if name != "pp"):
        tensors = {"input_ids": input_ids.cpu(), "logits": found[0].float().cpu().contiguous()}
        try:
            save_file(tensors, out / FILE)
        except SafetensorError as error:
            raise OSError(f"{out / FILE}: {error}") from error
