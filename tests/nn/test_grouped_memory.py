"""Memory of grouped GEMMs on a CPU, whose sizes change with every microbatch."""

import random
import subprocess
import sys

import pytest
import torch

from kumi.nn import grouped_gemm
from kumi.nn.grouped_gemm import padded_size

# Two layers of eight experts, 25 steps of four microbatches; the resident MiB after steps 2 and 25.
SCRIPT = """
import torch
from pathlib import Path
from kumi.nn.grouped_gemm import grouped_linear

torch.set_num_threads(1)
torch.set_float32_matmul_precision("medium")
torch.manual_seed(0)
weights = [torch.randn(8, 96, 64, requires_grad=True) for _ in range(2)]
for step in range(1, 26):
    for weight in weights * 2:
        counts = torch.multinomial(torch.rand(8) + 0.5, 512, replacement=True).bincount(minlength=8)
        grouped_linear(torch.randn(512, 64, requires_grad=True), weight, counts).sum().backward()
    if step in (2, 25):
        print(int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20)
"""


def test_memory_does_not_grow_with_the_sizes_met():
    """Before sizes were padded: 90 MiB grew after step 2 here, and 523 MiB in a run of examples/moe.toml."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    second, last = map(float, done.stdout.split())
    assert last - second < 25


def test_sizes_are_few_and_close():
    sizes = {padded_size(count) for count in range(1, 4097)}
    assert len(sizes) == 1 + 4 * 9
    assert all(count <= padded_size(count) <= max(8, 1.25 * count) for count in range(4097))
    assert padded_size(0) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padded_products_are_those_of_the_rows(dtype, monkeypatch):
    draw = random.Random(0)
    counts = torch.tensor([0, 1, 7, 8, 9, draw.randrange(10, 99)])
    rows = torch.randn(int(counts.sum()), 16, dtype=dtype)
    weight = torch.randn(len(counts), 24, 16, dtype=dtype)
    results = []
    for compiles in (False, True):
        monkeypatch.setattr(grouped_gemm, "_compiles_kernels", lambda rows, value=compiles: value)
        inputs = [rows.clone().requires_grad_(), weight.clone().requires_grad_()]
        out = grouped_gemm.grouped_linear(*inputs, counts)
        out.backward(torch.ones_like(out))
        results.append([out.detach(), *(value.grad for value in inputs)])
    for plain, padded in zip(*results, strict=True):
        torch.testing.assert_close(padded, plain)
