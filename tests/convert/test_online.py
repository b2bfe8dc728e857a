"""Export of a model in training: names and bits are those of the files, on any layout, in the same order everywhere."""

from pathlib import Path

import pytest
import torch

from kumi.convert import weights_reader
from kumi.errors import ModelError
from kumi.parallel import build
from kumi.parallel.export_weights import export_tensors
from kumi.spec import families
from kumi.spec.layout import Layout
from kumi.spec.precision import PRECISIONS
from ranks import run_ranks
from steps import mesh_of
from weights import read_tensors

LAYOUTS = [
    ("qwen2-window", Layout(tp=2)),
    ("phi3", Layout(dp_shard=2, zero=3)),
    ("gpt-neox", Layout(pp=2)),
    ("mixtral", Layout(dp_shard=2, ep=2, zero=3)),
    ("llama-tied", Layout(pp=2)),
    ("deepseek-v3", Layout(tp=2)),
    ("llama", Layout(dp_replicate=2)),
]


def _exported(folder: str, layout: Layout, dtype, to: str):
    """Import the model in `folder` into `layout`, and return the tensors exported from this rank."""
    spec, mesh = families.from_hf(families.read_config(folder)), mesh_of(layout)
    model = build(spec, mesh, PRECISIONS["fp32"], weights=weights_reader(folder, spec))
    return [(name, tensor.clone()) for name, tensor in export_tensors(model, mesh, dtype=dtype, to=to)]


def _equal(pairs, folder: Path, dtype=None):
    expected = dict(read_tensors(folder))
    tensors = dict(pairs)
    assert len(tensors) == len(pairs)
    assert tensors.keys() == expected.keys()
    for name, value in expected.items():
        target = value if dtype is None else value.to(dtype)
        assert tensors[name].dtype == target.dtype
        assert torch.equal(tensors[name].view(torch.uint8), target.view(torch.uint8)), name


@pytest.mark.parametrize(("case", "layout"), LAYOUTS)
def test_every_rank_gets_what_the_files_have(case, layout, saved):
    folder = saved(case)
    results = run_ranks(2, _exported, str(folder), layout, None, "all")
    for pairs in results:
        _equal(pairs, folder)
    assert [name for name, _ in results[0]] == [name for name, _ in results[1]]


def test_only_the_first_rank_gets_them_in_another_dtype(saved):
    folder = saved("qwen3")
    first, second = run_ranks(2, _exported, str(folder), Layout(tp=2), torch.bfloat16, "first")
    _equal(first, folder, torch.bfloat16)
    assert [name for name, _ in second] == [name for name, _ in first]
    assert all(tensor.numel() == 0 for _, tensor in second)


def test_one_process_alone(saved):
    folder = saved("gpt2")
    _equal(_exported(str(folder), Layout(), None, "all"), folder)
    with pytest.raises(ModelError, match="to='some'"):
        _exported(str(folder), Layout(), None, "some")
