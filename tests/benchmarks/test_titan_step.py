"""torchtitan's step in the GPU benchmark does what kumi's does."""

from __future__ import annotations

import gc
import json

import gpu_case
import pytest
import torch
from gpu_cases import Case
from safetensors.torch import save_file

import gpu
from kumi.convert.load_weights import weights_reader
from kumi.parallel.stage_modules import unwrap
from kumi.validation.fitting_case import StepCase
from kumi.validation.model_shapes import LLAMA_1B, TINY
from kumi.validation.timed_step import prepared

CPU = torch.device("cpu")
titan_only = pytest.mark.skipif(
    gpu.why_no_titan() is not None, reason="compares with torchtitan: pip install torchtitan==0.2.2"
)
SCALED = TINY | {"rope_scaling": LLAMA_1B["rope_scaling"] | {"original_max_position_embeddings": 16}}


@pytest.fixture(autouse=True)
def left_as_found():
    """torchtitan collects garbage by itself, and its FSDP makes a process group."""
    yield
    gc.enable()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@titan_only
@pytest.mark.parametrize(
    ("config", "recompute", "fsdp"),
    [
        (TINY, "none", False),
        (TINY, "selective", False),
        (TINY | {"intermediate_size": 256}, "none", True),
        (SCALED | {"tie_word_embeddings": True}, "full", False),
    ],
    ids=["plain", "selective", "fsdp", "tied and scaled"],
)
def test_losses_are_those_of_kumi(config, recompute, fsdp, tmp_path):
    """With the same weights and tokens, in float32."""
    from titan_step import TitanStep

    kumi = prepared(StepCase(config, seq_len=64, microbatch=2, precision="fp32"), CPU)
    batch = kumi.batch.batch
    tokens = torch.from_numpy(batch["input_ids"]), torch.from_numpy(batch["labels"])
    titan = TitanStep(config, tokens, CPU, recompute=recompute, precision="float32", fsdp=fsdp)
    with torch.no_grad():
        for name, weight in titan.model.named_parameters():
            if "layers" in name and weight.dim() == 2:
                weight.mul_(8.0)  # so that rotations matter: initial attention is nearly even
    save_hugging_face(titan, config, tmp_path)
    read = weights_reader(tmp_path, kumi.rank_state.run.model, 0)
    with torch.no_grad():
        for name, weight in unwrap(kumi.rank_state.model).named_parameters():
            weight.copy_(read(f"model/{name}", (0,) * weight.dim(), tuple(weight.shape)))
    assert titan().item() == pytest.approx(kumi().item(), abs=1e-4)


def save_hugging_face(titan, config, folder):
    """Write the weights as a Hugging Face model, by torchtitan's own conversion."""
    from torchtitan.models.llama3 import Llama3StateDictAdapter

    weights = {
        name.replace("_checkpoint_wrapped_module.", ""): weight for name, weight in titan.model.state_dict().items()
    }
    files = Llama3StateDictAdapter(titan.args, None).to_hf(weights)
    if config["tie_word_embeddings"]:
        del files["lm_head.weight"]
    whole = {name: getattr(weight, "full_tensor", lambda weight=weight: weight)() for name, weight in files.items()}
    save_file({name: weight.contiguous() for name, weight in whole.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


@titan_only
@pytest.mark.parametrize("system", ["titan", "titan-fsdp"])
def test_the_case_trains(system):
    result = gpu_case.run(Case(system, "tiny", 2, "selective", seq_len=32), CPU, seconds=0.02)
    assert result["status"] == "ok"
    assert result["last_loss"] < result["first_loss"]
    assert result["estimated_bytes"] is None


def test_another_version_is_skipped_with_a_sentence(monkeypatch):
    monkeypatch.setattr(gpu, "find_spec", lambda name: object())
    monkeypatch.setattr(gpu, "version", lambda name: "0.3.0")
    reason = "written for torchtitan 0.2, and 0.3.0 is here: pip install torchtitan==0.2.2"
    assert gpu.check_packages() == {"titan": reason, "titan-fsdp": reason}
    monkeypatch.setattr(gpu, "find_spec", lambda name: None if name == "tyro" else object())
    assert gpu.check_packages()["titan"] == "tyro not installed: pip install torchtitan==0.2.2"
