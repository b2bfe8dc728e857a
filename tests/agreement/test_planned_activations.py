"""What layers that are only planned for keep for the backward, against plain PyTorch with the ledger's parameters."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from kumi.nn import rope
from kumi.nn.mlp import gated
from kumi.nn.norm import RMSNorm
from kumi.spec import ledger
from kumi.spec.model import MLP, Attention, LatentAttention, LayerSpec, ModelSpec, MoE, Rope

ROWS, LENGTH, HIDDEN, HEADS = 2, 24, 64, 4
TOKENS = ROWS * LENGTH
LATENT = LatentAttention(HEADS, 20, 28, 12, 4, 16, Rope(10000.0))
GROUPED = Attention(HEADS, HEADS, 16, None, True, True, fused_qkv=True)
EXPERTS = MoE(6, 3, 40, 48)

LAYERS = {
    "gpt": LayerSpec(GROUPED, MLP(256, True, "gelu", gated=False)),
    "relu": LayerSpec(GROUPED, MLP(256, True, "relu", gated=False)),
    "parallel": LayerSpec(GROUPED, MLP(256, True, "gelu", gated=False), parallel=True),
    "one-norm": LayerSpec(GROUPED, MLP(256, True, "gelu", gated=False), parallel=True, shared_norm=True),
    "post-norms": LayerSpec(GROUPED, MLP(256, True, "gelu", gated=False), post_norms=True),
    "experts": LayerSpec(replace(GROUPED, qkv_bias=False, out_bias=False), EXPERTS),
    "latent": LayerSpec(LATENT, EXPERTS),
    "latent-without-query-latent": LayerSpec(replace(LATENT, q_lora_rank=None), MLP(96, fused=True)),
}


class Layer:
    """One layer on a batch (B, S, D), its modules found by the names of the ledger's parameters."""

    def __init__(self, spec):
        self.spec, self.layer, self.prefix = spec, spec.layers[0], f"{spec.names.layers}.0."
        params = [param for op in ledger.layer_ops(spec, 0) for param in op.params]
        generator = torch.Generator().manual_seed(0)
        self.weights = {
            param.name.removeprefix(self.prefix): torch.randn(param.shape, generator=generator).requires_grad_()
            for param in params
        }
        width = LATENT.qk_rope_head_dim
        positions = torch.arange(LENGTH).expand(ROWS, LENGTH)
        self.cos, self.sin = rope.tables(Rope(10000.0), width, positions)

    def __call__(self, x):
        names, layer = self.spec.names, self.layer
        normed = self.norm(x, names.attention_norm)
        attended = self.latent(normed) if isinstance(layer.attention, LatentAttention) else self.grouped(normed)
        if layer.post_norms:
            attended = self.norm(attended, names.attention_post_norm)
        middle = x if layer.parallel else x + attended
        normed = normed if layer.shared_norm else self.norm(middle, names.mlp_norm)
        out = self.experts(normed) if isinstance(layer.mlp, MoE) else self.dense(normed, "mlp")
        if layer.post_norms:
            out = self.norm(out, names.mlp_post_norm)
        return x + attended + out if layer.parallel else middle + out

    def norm(self, x, name):
        weight, bias = self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias")
        if bias is not None:
            return F.layer_norm(x, weight.shape, weight, bias)
        module = RMSNorm(weight.numel(), 1e-5, device=None, dtype=torch.float32)
        module.weight = torch.nn.Parameter(weight.detach())
        return module(x)

    def linear(self, x, name):
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def grouped(self, x):
        q, k, v = self.linear(x, "self_attn.qkv_proj").view(ROWS, LENGTH, 3, HEADS, -1).unbind(2)
        return self.linear(self.attend(q, k, v), "self_attn.o_proj")

    def attend(self, q, k, v):
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(ROWS, LENGTH, -1)

    def latent(self, x):
        if self.layer.attention.q_lora_rank is None:
            q = self.linear(x, "self_attn.q_proj")
        else:
            q = self.norm(self.linear(x, "self_attn.q_a_proj"), "self_attn.q_a_layernorm")
            q = self.linear(q, "self_attn.q_b_proj")
        q_nope, q_rope = q.view(ROWS, LENGTH, HEADS, -1).split([12, 4], dim=-1)
        latent, k_rope = self.linear(x, "self_attn.kv_a_proj_with_mqa").split([28, 4], dim=-1)
        kv = self.linear(self.norm(latent, "self_attn.kv_a_layernorm"), "self_attn.kv_b_proj")
        k_nope, v = kv.view(ROWS, LENGTH, HEADS, -1).split([12, 16], dim=-1)
        k_rope = rope.rotate(k_rope.unsqueeze(2), self.cos, self.sin).expand(-1, -1, HEADS, -1)
        q = torch.cat([q_nope, rope.rotate(q_rope, self.cos, self.sin)], dim=-1)
        k = torch.cat([k_nope, k_rope], dim=-1)
        return self.linear(self.attend(q, k, v.contiguous()), "self_attn.o_proj")

    def dense(self, x, name):
        if self.layer.mlp.hidden_act in ("gelu", "relu"):
            act = {"gelu": F.gelu, "relu": F.relu}[self.layer.mlp.hidden_act]
            hidden = act(self.linear(x, f"{name}.up_proj"))
        elif f"{name}.gate_up_proj.weight" in self.weights:
            hidden = gated(*self.linear(x, f"{name}.gate_up_proj").chunk(2, dim=-1))
        else:
            hidden = gated(self.linear(x, f"{name}.gate_proj"), self.linear(x, f"{name}.up_proj"))
        return self.linear(hidden, f"{name}.down_proj")

    def experts(self, x):
        moe, flat = self.layer.mlp, x.flatten(0, 1)
        scores = self.linear(flat, "mlp.gate").softmax(dim=-1)
        weights, chosen = scores.topk(moe.num_experts_per_tok)
        order = chosen.flatten().argsort()
        counts = chosen.flatten().bincount(minlength=moe.num_experts).tolist()
        rows = flat.index_select(0, order // moe.num_experts_per_tok)
        hidden = gated(*self.each(rows, "gate_up_proj", counts).chunk(2, dim=-1))
        out = self.each(hidden, "down_proj", counts)[order.argsort()].view(TOKENS, moe.num_experts_per_tok, HIDDEN)
        return (out * weights[..., None]).sum(dim=1).view_as(x) + self.dense(x, "mlp.shared_experts")

    def each(self, rows, name, counts):
        matrices = self.weights[f"mlp.experts.{name}"]
        return torch.cat([F.linear(part, matrix) for part, matrix in zip(rows.split(counts), matrices)])


@pytest.mark.parametrize("name", LAYERS)
def test_what_a_layer_keeps(name):
    norm = "rmsnorm" if name in ("experts", "latent", "latent-without-query-latent") else "layernorm"
    names = replace(ModelSpec("x", 1, 1, (), 0.0, 1).names, attention_post_norm="norm_a", mlp_post_norm="norm_b")
    spec = ModelSpec("tiny", 97, HIDDEN, (LAYERS[name],), 1e-5, LENGTH, norm=norm, names=names)
    layer = Layer(spec)
    excluded = {tensor.untyped_storage().data_ptr() for tensor in (*layer.weights.values(), layer.cos, layer.sin)}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        # Norms have a copy of their weight: vectors without a row for every token are parameters.
        if storage.data_ptr() not in excluded and tensor.numel() >= TOKENS:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = layer(torch.randn(ROWS, LENGTH, HIDDEN, requires_grad=True))
    sizes = {"compute": 4, "float32": 4, "int64": 8}
    saved = [act for op in ledger.layer_ops(spec, 0) for act in op.saved]
    listed = sum(act.numel_per_token * sizes[act.dtype] for act in saved) * TOKENS
    # Indices of experts are kept in more than one order.
    assert listed * 0.999 <= sum(kept.values()) <= listed * (1.04 if isinstance(LAYERS[name].mlp, MoE) else 1.001)
    out.sum().backward()
