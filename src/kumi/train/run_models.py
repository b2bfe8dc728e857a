"""Build the models of a run: the policy and its critic, from initial weights or a checkpoint, and the reference."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from torch import nn

from kumi.config import ResolvedRun
from kumi.convert import weights_reader
from kumi.convert.hf.adapter_read import adapters_reader
from kumi.parallel.build import build
from kumi.parallel.mesh import Mesh
from kumi.parallel.state_tensors import PieceReader
from kumi.spec.model import ModelSpec


def build_policy(run: ResolvedRun, mesh: Mesh, saved: PieceReader | None = None) -> nn.Module:
    """Return the model that `run` trains, with the tensors `saved` of a checkpoint; with initial weights if None."""
    weights, adapters = initial_weights(run)
    if saved is not None:
        adapters = saved
        weights = weights if run.model.lora is not None else saved
    return _build(run, run.model, mesh, weights, adapters)


def build_reference(run: ResolvedRun, mesh: Mesh) -> nn.Module:
    """Return the reference model of `run`: the one that reference.model names, or the policy before its first step.

    A reference that reference.model names is built with adapters, too, like the policy: untrained ones change nothing.
    """
    weights, adapters = initial_weights(run)
    if run.reference_folder is not None:
        weights, adapters = weights_reader(run.reference_folder, run.base), run.config.train.seed
    return _build(run, run.model, mesh, weights, adapters)


def build_critic_model(run: ResolvedRun, mesh: Mesh, saved: PieceReader | None = None) -> nn.Module:
    """Return the critic of `run`, with the tensors `saved` of a checkpoint; with initial weights if `saved` is None.

    Initially it is the model that critic.model names, or else the policy; a language model gets a score head drawn from
    train.seed. Adapters begin without effect.
    """
    critic, seed = run.job.critic, run.config.train.seed
    assert critic is not None, "the run trains a critic"
    weights: int | PieceReader = seed
    folder = run.critic_folder or (run.source if run.config.model.init == "pretrained" else None)
    if folder is not None:
        weights = weights_reader(folder, replace(critic, lora=None), seed)
    adapters: int | PieceReader = seed
    if saved is not None:
        adapters = saved
        weights = weights if critic.lora is not None else saved
    return _build(run, critic, mesh, weights, adapters)


def initial_weights(run: ResolvedRun) -> tuple[int | PieceReader, int | PieceReader]:
    """Return the weights and the adapters before the first step: readers of tensors, or a seed."""
    weights: int | PieceReader = run.config.train.seed
    adapters: int | PieceReader = run.config.train.seed
    if run.source is not None and run.config.model.init == "pretrained":
        weights = weights_reader(run.source, run.base, run.config.train.seed)
    if run.config.lora is not None and run.config.lora.source is not None:
        adapters = adapters_reader(Path(os.path.expanduser(run.config.lora.source)), run.model)
    return weights, adapters


def _build(
    run: ResolvedRun, model: ModelSpec, mesh: Mesh, weights: int | PieceReader, adapters: int | PieceReader
) -> nn.Module:
    return build(model, mesh, run.precision, weights=weights, compile=run.compiles, comm=run.comm, adapters=adapters)
