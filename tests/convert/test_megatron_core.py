"""The real megatron-core package, on the CPU: it loads kumi's checkpoints and computes kumi's logits, and kumi reads
its checkpoints."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from forked import run_forked
from kumi import load_decoder
from kumi.convert import convert
from kumi.convert.megatron import read_megatron
from kumi.convert.megatron.write_megatron import ITERATION, MegatronOptions
from kumi.convert.open_model import open_source
from kumi.megatron import model_fields as megatron_model
from kumi.spec import families

pytestmark = pytest.mark.skipif(
    not all(map(find_spec, ("megatron", "psutil"))),
    reason="megatron-core or psutil is not installed: pip install -e '.[export-check]'",
)
CASES = ("llama-tied", "qwen3", "mixtral")
# Megatron-Core's ways to name saved tensors: layers as a dim; as part of the name; halves of matrices apart.
LAYOUTS = (
    {"singleton_local_shards": False},
    {"singleton_local_shards": False, "non_homogeneous_layers": True},
    {"singleton_local_shards": True},
)


def run(jobs: list[dict[str, Any]], folder: Path) -> None:
    """Carry out `jobs` on two ranks in a forked child: Megatron-Core changes PyTorch."""
    (folder / "jobs.json").write_text(json.dumps(jobs))
    code, stdout, stderr = run_forked(two_ranks, folder, timeout=900)
    assert code == 0, f"{stdout[-3000:]}{stderr[-3000:]}"


def two_ranks(folder: Path) -> None:
    """Import Megatron-Core, then fork the two ranks. Raise SystemExit if one of them fails."""
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    from megatron_job import main

    ranks = [
        multiprocessing.get_context("fork").Process(
            target=main, args=(str(folder / "jobs.json"), rank, 2, str(folder / "store"))
        )
        for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    if any(rank.exitcode for rank in ranks):
        raise SystemExit(f"exit codes of the ranks: {[rank.exitcode for rank in ranks]}")


def test_megatron_loads_computes_and_saves(saved: Callable[..., Path], tmp_path: Path) -> None:
    """At TP 1 and 2 the logits are kumi's, and Megatron-Core saves the tensors that it loaded, under any names."""
    jobs, sources = [], {case: saved(case) for case in CASES}
    for case, layout in zip(CASES, LAYOUTS):
        spec = families.from_hf(families.read_config(sources[case]))
        rope = spec.layers[0].attention.rope
        written = tmp_path / f"{case}-megatron"
        convert(sources[case], written, to="megatron", verify=False, megatron=MegatronOptions(local=True, multiple=2))
        job = {
            "load": str(written / ITERATION),
            "vocab": spec.vocab_size + 1,
            "tied": spec.tie_word_embeddings,
            "theta": rope.rope_theta,
            "fields": megatron_model.model_config_fields(spec),
        }
        for tp in (1, 2):
            where = {"logits": str(tmp_path / f"{case}-{tp}.pt"), "save": str(tmp_path / f"{case}-{tp}")}
            jobs.append({**job, **where, "tp": tp, "layout": layout if tp == 1 else LAYOUTS[0]})
    run(jobs, tmp_path)
    ids = torch.randint(0, 97, (2, 12), generator=torch.Generator().manual_seed(3))
    ways = set()
    for case, source in sources.items():
        ours, original = load_decoder(source)(ids), open_source(source)
        for tp in (1, 2):
            assert (torch.load(tmp_path / f"{case}-{tp}.pt")[..., :97] - ours).abs().max() <= 1e-4
            keys = read_megatron.open_megatron_model(tmp_path / f"{case}-{tp}", config=source).keys
            ways.add((keys.homogeneous, keys.halves))
            again = open_source(tmp_path / f"{case}-{tp}", config=source)
            assert all(tensor.equal(original.read(name)) for name, tensor in again.tensors())
    assert ways == {(True, False), (False, False), (False, True)}
