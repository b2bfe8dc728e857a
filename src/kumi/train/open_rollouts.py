"""Open the source of batches of a run with [rollout]: its prompts, the engine that generates replies, its rewards, and
the forward passes that compute log-probs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from kumi.config import ResolvedRun
from kumi.config.reward_section import reward_specs
from kumi.config.run_length import run_mixture
from kumi.convert.hf.write_folder import read_generation
from kumi.data import Store, load_tokenizer
from kumi.data.binfile import Array
from kumi.inference.model_files import reply_ends
from kumi.inference.prompt_encoder import conversation_encoder
from kumi.inference.reply_text import decoder_of
from kumi.inference.sampling import Sampling
from kumi.nn.lora import without_adapters
from kumi.objectives.policy_gradient import PolicyGradient
from kumi.parallel.mesh import Mesh
from kumi.parallel.stage_modules import unwrap
from kumi.process_limits import usable_cores
from kumi.rewards import RewardScorer
from kumi.rollout.collect_groups import CollectSettings, GroupCollector
from kumi.rollout.own_engine import OwnEngine
from kumi.rollout.prompt_sampler import PromptSampler
from kumi.rollout.reply_advantages import token_targets
from kumi.rollout.rollout_batch import LogProbs, RowSettings, UpdateSettings
from kumi.rollout.rollout_estimates import RolloutEstimates
from kumi.rollout.rollout_history import UNFINISHED
from kumi.rollout.rollout_rows import ReplySequence
from kumi.rollout.rollout_source import RolloutSource, SourceSettings, Trainer
from kumi.rollout.score_replies import GivenScores, ReplyScorer, ScoredReplies, UnscoredReplies
from kumi.rollout.token_log_probs import PassSettings, reply_log_probs
from kumi.spec.balanced_rows import RowPlan
from kumi.spec.rollout import FILLS
from kumi.train.load_reward_models import load_reward_models
from kumi.train.prepare_data import chat_options, tokenizer_folder
from kumi.train.run_models import build_reference
from kumi.train.run_objective import run_objective

# Metadata of a checkpoint, or None for a new run.
Saved = Mapping[str, Any] | None


@contextmanager
def open_scorer(run: ResolvedRun, mesh: Mesh) -> Iterator[ReplyScorer | None]:
    """Yield what scores the replies of `run`, on rank 0; None on other ranks, and for a run without rollouts or
    rewards."""
    section = run.config.rollout
    if section is None or not run.config.rewards or mesh.rank != 0:
        yield None
        return
    tokenizer = load_tokenizer(tokenizer_folder(run))
    specs, given = reward_specs(run.config.rewards), GivenScores()
    with RewardScorer(specs, Path(), usable_cores(), section.max_new_tokens, given) as scorer:
        yield ReplyScorer(scorer, given, tokenizer.decode, decoder_of(tokenizer))


def open_rollouts(
    run: ResolvedRun,
    store: Store,
    mesh: Mesh,
    model: nn.Module,
    critic: nn.Module | None,
    scorer: ReplyScorer | None,
    saved: Saved,
) -> RolloutSource:
    """Return the batches of `run`, from the checkpoint's metadata `saved` on. Every rank calls this together.

    critic: the model whose scores are the values in the advantages; None if they need none.
    scorer: what scores replies, on rank 0; None on other ranks.
    """
    section, objective = run.config.rollout, run_objective(run)
    assert section is not None, "a run with rollouts has the section"
    assert isinstance(objective, PolicyGradient), "only policy gradients train on rollouts"
    sampling, tokenizer, layout = rollout_sampling(run), load_tokenizer(tokenizer_folder(run)), run.layout
    # Under sequence parallelism, the tp ranks need equal parts of a row.
    rows = RowSettings(run.batch.seq_len, layout.dp, layout.tp if layout.sequence_parallel else 1)
    models = load_reward_models(run, mesh, rows)
    identities = {} if models is None else models.identities
    collector = GroupCollector(
        PromptSampler(run_mixture(run.config, store), store.train_names),
        OwnEngine(model, mesh, slots=section.slots),
        # A run without rewards has a teacher, whose log-probs give the advantages.
        ScoredReplies(scorer, models, mesh) if run.config.rewards else UnscoredReplies(),
        mesh,
        CollectSettings(
            section.prompts,
            section.group_size,
            sampling,
            FILLS * section.slots * layout.dp,  # the replies of one call of the engine
            section.dynamic,
            section.max_rounds if section.dynamic else 1,
        ),
        run.out / UNFINISHED,
        _digest(sampling, store.content, section.group_size, identities),
    )
    trainer = Trainer(
        partial(reply_log_probs, model, mesh, _passes(run)),
        _reference_pass(run, mesh, model) if objective.reads_reference else None,
        objective.needs_old_log_probs,
        None if critic is None else partial(reply_log_probs, critic, mesh, PassSettings(layout.microbatch)),
        partial(token_targets, objective),
    )
    settings = SourceSettings(
        UpdateSettings(section.updates, section.passes, section.mask_truncated),
        rows,
        section.stop_after,
        section.samples_every,
        tokenizer.decode,
        RolloutEstimates(run.job, layout),
        identities,
    )
    return RolloutSource(collector, trainer, settings, layout.dp_index(mesh.rank), run.out, saved)


def _reference_pass(run: ResolvedRun, mesh: Mesh, model: nn.Module) -> LogProbs:
    """Return the pass of the reference model: the policy without its adapters, or a second model on the same layout."""
    if run.config.off_adapters_are_reference:
        return partial(_without_adapters, model, mesh, _passes(run))
    reference = unwrap(build_reference(run, mesh)).eval().requires_grad_(False)
    return partial(reply_log_probs, reference, mesh, _passes(run))


def _without_adapters(
    model: nn.Module, mesh: Mesh, settings: PassSettings, sequences: Sequence[ReplySequence], plans: Sequence[RowPlan]
) -> Array:
    """Return `reply_log_probs` of `model` without its adapters."""
    with without_adapters(model):
        return reply_log_probs(model, mesh, settings, sequences, plans)


def _passes(run: ResolvedRun) -> PassSettings:
    """Return how the passes of `run` compute log-probs: as its training does."""
    assert run.config.rollout is not None, "a run with rollouts has the section"
    return PassSettings(run.layout.microbatch, run.config.rollout.temperature)


def rollout_sampling(run: ResolvedRun) -> Sampling:
    """Return how the replies of `run` are drawn, and the tokens that end them."""
    section, folder = run.config.rollout, tokenizer_folder(run)
    assert section is not None, "a run with rollouts has the section"
    tokenizer, chat = load_tokenizer(folder), chat_options(run)
    stops = reply_ends(tokenizer, read_generation(folder) or {}, chat, run.model.vocab_size, folder)
    encoder = conversation_encoder(tokenizer, chat, stops)
    return Sampling(
        max_new_tokens=section.max_new_tokens,
        temperature=section.temperature,
        seed=run.config.train.seed,
        stop_ids=stops if encoder is None else encoder.stop_ids,
    )


def _digest(sampling: Sampling, data: str, group_size: int, identities: Mapping[str, Mapping[str, str]]) -> str:
    """Return a digest of all that replies and the scores of reward models depend on beside the policy's weights.

    identities: the folder and the digest of each reward model, by name.
    """
    content = (
        data,
        group_size,
        sorted((name, identity["digest"]) for name, identity in identities.items()),
        sampling.max_new_tokens,
        sampling.temperature,
        sampling.seed,
        sorted(sampling.stop_ids),
    )
    return hashlib.blake2b(repr(content).encode(), digest_size=4).hexdigest()
