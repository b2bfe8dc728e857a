"""The real megatron-core package, on the CPU: it loads kumi's checkpoints and computes kumi's logits, and kumi reads
its checkpoints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

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
    """Carry out `jobs` on two ranks that are programs of their own: Megatron-Core changes PyTorch."""
    (folder / "jobs.json").write_text(json.dumps(jobs))
    program = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        f"from megatron_job import main\n"
        f"main({str(folder / 'jobs.json')!r}, int(sys.argv[1]), 2, {str(folder / 'store')!r})"
    )
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", program, str(rank)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=900)[0].decode() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(output[-3000:] for output in outputs)


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
