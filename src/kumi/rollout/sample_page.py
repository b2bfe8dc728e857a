"""A page of the replies of a rollout batch with their rewards, for people."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from kumi.files.output import make_folder, replace_text
from kumi.rollout.rollout_batch import RolloutBatch
from kumi.safe_output import fenced

# The number of groups that a page shows.
_GROUPS = 3


def write_sample_page(out: Path, batch: RolloutBatch, decode: Callable[[list[int]], str]) -> Path:
    """Write the page samples/rollout-N.md of the run folder `out`, N the updates before the batch; return its path.

    It has the first groups of `batch`, each reply with its reward and the parts of the reward. Texts are code blocks,
    in which control characters are escaped, so that they cannot change a page or a terminal.
    """
    lines = [f"# Rollouts after step {batch.version}", ""]
    for group, prompt in list(zip(batch.groups, batch.prompts, strict=True))[:_GROUPS]:
        lines += [f"## Prompt {prompt.number}, row {prompt.index} of {prompt.source}", ""]
        lines += [fenced(decode(list(prompt.ids))), ""]
        for reply, outcome in zip(group.replies, group.outcomes, strict=True):
            scores = ", ".join(f"{name} {_number(value)}" for name, value in outcome.parts.items())
            total = _number(None if math.isnan(outcome.reward) else outcome.reward)
            mean = f"{reply.log_probs.mean():.3f} nats a token"
            lines += [
                f"Reward {total} ({scores}); {len(reply.ids)} tokens, ended by {reply.finish}, {mean}:",
                "",
                fenced(decode(reply.ids.tolist())),
                "",
            ]
    path = out / "samples" / f"rollout-{batch.version}.md"
    make_folder(path.parent)
    replace_text(path, "\n".join(lines))
    return path


def _number(value: float | None) -> str:
    return "not scored" if value is None else f"{value:g}"
