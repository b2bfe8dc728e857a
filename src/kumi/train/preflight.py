"""The fire drill: what would fail after an hour fails in the first minute.

Between the first backward pass and its update, when memory is fullest, the run evaluates one microbatch a rank and
saves a whole checkpoint to the disk, which is then removed. Nothing that the run learns from is touched.
"""

from __future__ import annotations

from pathlib import Path

from kumi.files.output import remove_tree
from kumi.parallel.mesh import barrier
from kumi.storage import checkpoint
from kumi.train.evaluate import evaluate
from kumi.train.train_state import Parts, TrainState, meta, pieces

FOLDER = "drill"


def fire_drill(parts: Parts, state: TrainState, root: Path, attempt: str) -> None:
    """Evaluate, and save into a folder of its own under `root` that is gone afterwards. Raises what they raise."""
    layout, rank = parts.run.layout, parts.mesh.rank
    if parts.validation is not None:
        evaluate(parts, first=layout.dp * layout.microbatch)
    if rank == 0:
        remove_tree(root / FOLDER)  # of a run that was killed before it removed its own
    barrier(parts.mesh)
    folder = checkpoint.step_folder(root / FOLDER, state.step)
    checkpoint.save(folder, pieces(parts), meta(state, parts), rank=rank, ranks=layout.world_size, attempt=attempt)
    barrier(parts.mesh)
    if rank == 0:
        remove_tree(root / FOLDER)
