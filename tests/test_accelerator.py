"""What a device can do: by NVIDIA's numbers, and with PyTorch for ROCm by the table alone."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

from kumi import accelerator
from kumi.accelerator import CAPABILITIES, can, is_rocm
from kumi.config.cluster_source import cluster_spec
from kumi.config.job_sections import ClusterSection
from kumi.errors import ConfigError

SOURCE = Path(accelerator.__file__).parent
GPU = torch.device("cuda", 0)


@pytest.fixture
def on(monkeypatch):
    """A function that gives this process a GPU of a compute capability; `hip`: that of ROCm."""

    def give(capability, hip=None):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.version, "hip", hip)
        return {name for name in CAPABILITIES if can(GPU, name)}

    return give


def test_capabilities_of_nvidia(on):
    flash = {"packed flash attention", "FlexAttention", "float32 results of 16-bit products", "symmetric memory"}
    assert on((7, 0)) == on((7, 5)) == set()
    assert on((8, 0)) == on((8, 6)) == flash
    assert on((8, 9)) == flash | {"float8"}
    assert on((9, 0)) == flash | {"float8", "float8 by rows", "flash attention 3", "flash attention 4"}
    assert on((10, 0)) == flash | {"float8", "float8 by rows", "flash attention 4"}
    assert on((12, 0)) == flash | {"float8", "float8 by rows"}


def test_a_gpu_of_amd_has_the_capabilities_of_its_column(on):
    """Its numbers, such as 9.4 of an MI300X, are not NVIDIA's."""
    assert on((9, 4), hip="6.4") == {"packed flash attention", "FlexAttention"}
    assert is_rocm()
    assert accelerator.driver_has_started(), "a fork of a process that may have used an AMD GPU is not safe"


def test_a_cpu_has_none(on):
    on((9, 0))
    assert not any(can(torch.device("cpu"), name) for name in CAPABILITIES)


def test_torch_for_rocm_needs_a_description_of_the_gpus(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("kumi.config.local_machine.version", lambda package: "2.13.0+rocm7.1")
    with pytest.raises(ConfigError, match=r"torch 2.13.0\+rocm7.1 is for AMD's GPUs, which kumi cannot list"):
        cluster_spec(ClusterSection(source="auto"))
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "")
    assert cluster_spec(ClusterSection(source="auto")).device.kind == "cpu"


# Calls that only CUDA answers, and where they may be.
ALLOWED = {"get_device_capability": {"accelerator.py"}}


def test_what_is_cudas_alone_is_in_one_file():
    """No other module asks for a compute capability, or compares a device's type with "cuda"."""
    wrong = []
    for file in SOURCE.rglob("*.py"):
        name, tree = str(file.relative_to(SOURCE)), ast.parse(file.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and name not in ALLOWED.get(node.attr, {name}):
                wrong.append(f"{name}:{node.lineno} {node.attr}")
            compared = ast.unparse(node) if isinstance(node, ast.Compare) else ""
            if "device.type" in compared and compared.endswith("= 'cuda'"):
                wrong.append(f"{name}:{node.lineno} {compared}")
    assert wrong == []
