"""Megatron-Core's own GPTModel on the CPU: loads checkpoints, computes logits, and saves checkpoints of its own.

Two ranks carry out a list of {tp, load, save, layout, logits, vocab, tied, theta, fields}: the degree of tensor
parallelism, the checkpoint to load, the one to save and how it is keyed, where to put the logits of `TOKENS`, and the
fields of TransformerConfig.
"""

# PyTorch without an accelerator lacks these; Megatron-Core needs them when it is imported.
# ruff: noqa: E402

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# No accelerator is at hand where Megatron-Core asks for the current one.
torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign,assignment]

import torch.nn.functional as F
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import random
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import moe_utils

POSITIONS, VOCAB = 12, 97
TOKENS = torch.randint(0, VOCAB, (2, POSITIONS), generator=torch.Generator().manual_seed(3))
CPU = {
    "use_cpu_initialization": True,
    "params_dtype": torch.float32,
    "pipeline_dtype": torch.float32,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "apply_rope_fusion": False,
    "persist_layer_norm": False,
    "gradient_accumulation_fusion": False,
}


def build(job: dict[str, Any], tp: int) -> Any:
    """The model that `job` describes, with random weights."""
    fields = {**job["fields"], "activation_func": F.silu, **CPU, "tensor_model_parallel_size": tp}
    experts = fields.get("num_moe_experts")
    if experts:
        fields |= {"moe_grouped_gemm": False, "moe_token_dispatcher_type": "allgather", "moe_router_dtype": "fp32"}
    spec = get_gpt_layer_local_spec(num_experts=experts, qk_layernorm=fields["qk_layernorm"], normalization="RMSNorm")
    return GPTModel(
        TransformerConfig(**fields),
        spec,
        vocab_size=job["vocab"],
        max_sequence_length=64,
        parallel_output=True,
        share_embeddings_and_output_weights=job["tied"],
        position_embedding_type="rope",
        rotary_base=job["theta"],
    )


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    """The logits (B, S, V) of `TOKENS`, of all tensor-parallel ranks."""
    places = torch.arange(POSITIONS).expand(2, POSITIONS)
    hidden = torch.triu(torch.ones(POSITIONS, POSITIONS, dtype=torch.bool), 1)[None, None]
    own = model(TOKENS, places, hidden).contiguous()
    group = parallel_state.get_tensor_model_parallel_group()
    shards = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(shards, own, group=group)
    return torch.cat(shards, -1)


def carry_out(job: dict[str, Any]) -> None:
    """Load, compute, save."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=job["tp"])
    torch.manual_seed(5)
    model = build(job, job["tp"]).eval()
    asked = model.sharded_state_dict(metadata={"singleton_local_shards": False})
    state = dist_checkpointing.load(asked, job["load"])
    common = {key: state.pop(key) for key in ("args", "iteration", "checkpoint_version", "content_metadata")}
    assert (common["args"].hidden_size, common["iteration"]) == (job["fields"]["hidden_size"], 0)
    model.load_state_dict(state)
    values = logits(model)
    if dist.get_rank() == 0:
        torch.save(values, job["logits"])
        Path(job["save"]).mkdir()
    dist.barrier()
    dist_checkpointing.save(model.sharded_state_dict(metadata=job["layout"]), job["save"])
    parallel_state.destroy_model_parallel()


def main(jobs: str, rank: int, world_size: int, store: str) -> None:
    """Carry out the jobs in the file `jobs`, as one of the ranks that meet at the file `store`."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    random.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    if not hasattr(moe_utils, "te_general_gemm"):
        # megatron-core 0.16 asks for it where TransformerEngine is absent.
        moe_utils.te_general_gemm = None
    for job in json.loads(Path(jobs).read_text()):
        carry_out(job)
    dist.destroy_process_group()
