"""Load the reward models of a run onto its layout, frozen and in the dtype of its computations."""

from __future__ import annotations

from kumi.config import ResolvedRun
from kumi.convert import weights_reader
from kumi.data import load_tokenizer
from kumi.data.row_path import open_encoder
from kumi.inference.reply_text import decoder_of, reply_text
from kumi.parallel.build import build
from kumi.parallel.mesh import Mesh
from kumi.rollout.reward_models import RewardModel, RewardModels
from kumi.rollout.reward_sequences import PolicyTokens, RenderedTokens, Sequences, TokenLimits
from kumi.rollout.rollout_batch import RowSettings
from kumi.spec.data_source import ChatOptions
from kumi.spec.precision import Precision
from kumi.train.prepare_data import tokenizer_folder
from kumi.train.reward_model_files import RewardModelFiles, open_reward_models, reward_model_identities


def load_reward_models(run: ResolvedRun, mesh: Mesh, rows: RowSettings) -> RewardModels | None:
    """Return the reward models of `run`; None if it has none. Every rank calls this together."""
    files = open_reward_models(run)
    if not files:
        return None
    decode = decoder_of(load_tokenizer(tokenizer_folder(run)))
    dtype = run.precision.compute
    precision = Precision("rewards", dtype, dtype, dtype)
    models = [
        RewardModel(
            each.reward.name,
            build(each.spec, mesh, precision, weights=weights_reader(each.folder, each.spec), frozen=True),
            _sequences(each),
        )
        for each in files
    ]
    return RewardModels(
        models,
        reward_model_identities(run),
        mesh,
        rows,
        run.layout.microbatch,
        lambda prompt, reply: reply_text(decode, prompt, reply),
    )


def _sequences(files: RewardModelFiles) -> Sequences:
    """Return the object that makes the sequences that a reward model reads from prompts and replies.

    A sequence has the policy's tokens, or the tokens of the text as the reward model's own chat template renders it.
    """
    spec = files.spec
    limits = TokenLimits(spec.vocab_size, spec.learned_positions or spec.max_position_embeddings, files.padding)
    if files.reads == "tokens":
        return PolicyTokens(limits)
    return RenderedTokens(open_encoder(ChatOptions(), files.tokenizer), limits, whole=files.reads == "whole")
