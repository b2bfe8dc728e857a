"""NEFTune (noise on the token embeddings in training) in every layout: tokens get the same noise as in one process."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kumi.nn.decoder import Decoder
from kumi.nn.neftune import row_noise, scaled_noise
from kumi.parallel.mesh import Mesh
from kumi.parallel.ring_attention import positions_of_rank
from kumi.parallel.stage_modules import stages_of, unwrap


class EmbeddingNoise:
    """The noise of the embeddings of `decoder`. It is a function of seed, step, row and position.

    `alpha`: the scale of the noise.
    `seed`: the seed of the run.
    `step`: the number of the update.
    `row`: the index of the next row that this rank embeds, among the rows of all data-parallel ranks in the step.
    """

    def __init__(self, decoder: Decoder, alpha: float, mesh: Mesh) -> None:
        self.decoder, self.alpha, self.mesh = decoder, alpha, mesh
        self.seed = self.step = self.row = 0

    def __call__(self, x: Tensor, position_ids: Tensor, document_ids: Tensor | None) -> Tensor:
        """Return the embeddings `x` with noise: (B, S, D), or (B * S / tp, D) of this rank's tokens under sequence
        parallelism.

        `position_ids` (B, S) and `document_ids` are as in `Decoder.forward`. Without gradients, as in evaluation,
        return `x`.
        """
        if not (self.decoder.training and torch.is_grad_enabled()):
            return x
        (rows, length), layout = position_ids.shape, self.mesh.layout
        positions = torch.arange(length)
        if layout.cp > 1:
            positions = positions_of_rank(length * layout.cp, layout.cp, self.mesh.index("cp"))
        tokens, size = range(x.numel() // x.shape[-1]), x.shape[-1]
        if len(tokens) < rows * length:  # sequence parallelism: consecutive tokens of the flattened rows
            index = self.mesh.index("tp")
            tokens = range(index * len(tokens), (index + 1) * len(tokens))
        parts = []
        for row in range(tokens.start // length, -(-tokens.stop // length)):
            own = positions[max(0, tokens.start - row * length) : tokens.stop - row * length]
            options = {"seed": self.seed, "step": self.step, "row": self.row + row}
            parts.append(row_noise(own, size, device=x.device, **options))
        lengths = self.decoder.make_lengths(position_ids, document_ids)
        own_lengths = lengths if isinstance(lengths, int) else lengths.flatten()[tokens.start : tokens.stop]
        self.row += rows
        return x + scaled_noise(torch.cat(parts), own_lengths, self.alpha).view(x.shape).to(x.dtype)


def use_neftune(model: nn.Module, mesh: Mesh, alpha: float) -> None:
    """Make `model`, a result of `build`, add noise to its embeddings in training; `alpha` 0 adds none."""
    for stage in stages_of(unwrap(model)).values():
        if alpha and isinstance(stage, Decoder) and stage.has_embedding:
            stage.embedding_noise = EmbeddingNoise(stage, alpha, mesh)


def begin_noise_step(model: nn.Module, mesh: Mesh, seed: int, number: int, rows: int) -> None:
    """Begin update `number` of a run with `seed` for the noise of `model`.

    `rows`: the rows that each data-parallel rank has in the update.
    """
    for stage in stages_of(unwrap(model)).values():
        noise = getattr(stage, "embedding_noise", None)
        if isinstance(noise, EmbeddingNoise):
            noise.seed, noise.step, noise.row = seed, number, mesh.layout.dp_index(mesh.rank) * rows
