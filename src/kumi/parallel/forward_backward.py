"""The gradients of a step: what training and the dry run call."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from kumi.objectives import lm
from kumi.parallel import context, pipeline
from kumi.parallel.mesh import Mesh
from kumi.parallel.record import Record


def forward_backward(
    model: nn.Module, mesh: Mesh, batches: Iterable[dict[str, Tensor]], tokens: float, record: Record | None = None
) -> Tensor:
    """Add the gradients of a step's microbatches to the parameters, and return the loss of this rank's tokens.

    Each of `batches` has the decoder's arguments, (B, S), by name. `tokens` counts the step's trained tokens on all
    ranks. The head forms its gradient in the forward pass, so a loss scale must divide them already. `record` takes
    down what was done when.
    """
    microbatches = [context.cut(batch, mesh) for batch in batches]
    for inputs in microbatches:
        inputs["token_weights"] = lm.token_weights(inputs["labels"], tokens)
    return pipeline.train(model, mesh, microbatches, record)
