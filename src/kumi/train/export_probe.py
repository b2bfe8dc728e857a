"""The export probe: the trained model's logits on a few tokens, with which an export is compared."""

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
from kumi.parallel.data_parallel import reshard
from kumi.spec.layout import AXES
from kumi.train.train_state import RankState

PROBE_FILE = "probe.safetensors"
_SEQUENCES, _LENGTH = 3, 32


def probe_ids(mixture: Mixture, multiple: int = 1) -> npt.NDArray[np.int64]:
    """Return the probe's tokens (3, S): the beginnings of the first sequences of `mixture`.

    S is rounded up to a multiple of `multiple`, with zeros at the end.
    """
    ids = mixture.batch(0, _SEQUENCES)["input_ids"][:, :_LENGTH]
    return np.ascontiguousarray(np.pad(ids, ((0, 0), (0, -ids.shape[1] % multiple))))


@torch.no_grad()
def write_probe(rank_state: RankState, out: Path) -> None:
    """Write input ids (3, S) and the trained model's float32 logits (3, S, V) to `out`/probe.safetensors.

    All ranks call this. Of the ranks with the model's head, which computes the logits, the first one writes the file.
    """
    input_ids: Tensor = torch.from_numpy(rank_state.probe_ids).to(rank_state.mesh.device)
    rank_state.model.eval()
    with context_parallel.unsharded_sequences(rank_state.model):
        outputs = pipeline.forward_microbatches(rank_state.model, rank_state.mesh, [{"input_ids": input_ids}])
    rank_state.model.train()
    reshard(rank_state.model)
    if outputs and all(rank_state.mesh.index(name) == 0 for name in AXES if name != "pp"):
        tensors = {"input_ids": input_ids.cpu(), "logits": outputs[0].float().cpu().contiguous()}
        try:
            save_file(tensors, out / PROBE_FILE)
        except SafetensorError as error:
            raise OSError(f"{out / PROBE_FILE}: {error}") from error
