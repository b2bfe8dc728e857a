"""The preflight check: failures of evaluation or saving occur in the first minute, not after an hour.

Between the first backward pass and its update, when memory is fullest, the run evaluates one microbatch per rank and
the first batches of each task, saves a complete checkpoint and removes it. The check does not change the training
result.
"""

from __future__ import annotations

from pathlib import Path

from kumi.files.output import remove_tree
from kumi.parallel.mesh import barrier
from kumi.storage import checkpoint
from kumi.train.evaluate import evaluate
from kumi.train.train_state import RankState, TrainState, checkpoint_meta, checkpoint_pieces

# The temporary folder of the checkpoint.
_FOLDER = "drill"


def run_preflight(rank_state: RankState, state: TrainState, root: Path, attempt: str) -> None:
    """Evaluate, save a checkpoint into a temporary folder below `root`, and remove it. Let the errors of these pass.

    `attempt`: the name of this start of the run, by which rank 0 knows which files of the other ranks belong to it.
    """
    layout, rank = rank_state.run.layout, rank_state.mesh.rank
    if rank_state.validation is not None:
        evaluate(rank_state, first=layout.dp * layout.microbatch)
    if rank_state.tasks is not None:
        rank_state.tasks.compute_first_units()
    if rank == 0:
        remove_tree(root / _FOLDER)  # left behind by a killed run
    barrier(rank_state.mesh)
    folder = checkpoint.step_folder(root / _FOLDER, state.step)
    checkpoint.save(
        folder,
        checkpoint_pieces(rank_state),
        checkpoint_meta(state, rank_state),
        rank=rank,
        ranks=layout.world_size,
        attempt=attempt,
    )
    barrier(rank_state.mesh)
    if rank == 0:
        remove_tree(root / _FOLDER)
