"""The rows of data that an objective trains, and the columns that its batches need."""

from __future__ import annotations

from dataclasses import dataclass

# Kinds of rows (see `kumi.spec.data_source.ROW_KINDS`) whose tokens language modelling trains.
LM_KINDS = ("text", "chat", "prompt-completion", "instruction")


@dataclass(frozen=True)
class RowForm:
    """How units of data (a document, a reply, or both sides of a comparison) become rows of a batch.

    kinds: the kinds of rows of data that the objective trains.
    sequences: batches have the columns of sequences (see `kumi.data.packing.sequence_columns`).
    scored: every token of a sequence is an input, and its only label is at its last token, where a score head is read.
    mismatched: batches have as many rows again, in which each prompt is followed by the reply of the unit before.
    generates: the data are prompts, and the policy generates the replies that are trained (see `kumi.rollout`).
    """

    kinds: tuple[str, ...] = LM_KINDS
    sequences: bool = False
    scored: bool = False
    mismatched: bool = False
    generates: bool = False


LM_ROWS = RowForm()
# Prefix of the columns of mismatched rows.
MISMATCHED = "mismatched_"
# Replies of the policy to prompts.
ROLLOUTS = RowForm(("prompt",), generates=True)
