"""Saved activations of layers that kumi plans but does not train, against plain PyTorch modules."""

from math import prod

import pytest
import torch
import torch.nn.functional as F

from kumi.nn.mlp import swiglu
from kumi.spec import ledger
from kumi.spec.model import MLP, Attention, LayerSpec, ModelSpec

ROWS, LENGTH, HIDDEN, HEADS = 2, 24, 64, 4
TOKENS = ROWS * LENGTH
GROUPED = Attention(HEADS, HEADS, 16, None, True, True)

LAYERS = {
    "gpt": LayerSpec(GROUPED, MLP(256, True, "gelu", gated=False)),
    "relu": LayerSpec(GROUPED, MLP(256, True, "relu", gated=False)),
    "parallel": LayerSpec(GROUPED, MLP(256, True, "gelu", gated=False), parallel=True),
    "one-norm": LayerSpec(GROUPED, MLP(256, True, "gelu", gated=False), parallel=True, shared_norm=True),
    "post-norms": LayerSpec(GROUPED, MLP(256, True, "gelu", gated=False), post_norms=True),
    "gated": LayerSpec(GROUPED, MLP(96, True)),
}


class Layer:
    """One layer on a batch (B, S, D), with weights named as the ledger's parameters."""

    def __init__(self, spec):
        self.spec, self.layer, self.prefix = spec, spec.layers[0], "model.layers.0."
        params = [param for op in ledger.layer_ops(spec, 0) for param in op.params]
        generator = torch.Generator().manual_seed(0)
        self.weights = {
            param.name.removeprefix(self.prefix): torch.randn(param.shape, generator=generator).requires_grad_()
            for param in params
        }

    def __call__(self, x):
        layer = self.layer
        normed = self.norm(x, "input_layernorm")
        attended = self.grouped(normed)
        if layer.post_norms:
            attended = self.norm(attended, "self_attn_post_norm")
        middle = x if layer.parallel else x + attended
        normed = normed if layer.shared_norm else self.norm(middle, "post_attention_layernorm")
        out = self.dense(normed, "mlp")
        if layer.post_norms:
            out = self.norm(out, "mlp_post_norm")
        return x + attended + out if layer.parallel else middle + out

    def norm(self, x, name):
        weight, bias = self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
        return F.layer_norm(x, weight.shape, weight, bias)

    def linear(self, x, name):
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def grouped(self, x):
        q, k, v = (self.linear(x, f"self_attn.{letter}_proj").view(ROWS, LENGTH, HEADS, -1) for letter in "qkv")
        return self.linear(self.attend(q, k, v), "self_attn.o_proj")

    def attend(self, q, k, v):
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(ROWS, LENGTH, -1)

    def dense(self, x, name):
        if self.layer.mlp.hidden_act in ("gelu", "relu"):
            act = {"gelu": F.gelu, "relu": F.relu}[self.layer.mlp.hidden_act]
            hidden = act(self.linear(x, f"{name}.up_proj"))
        else:
            hidden = swiglu(self.linear(x, f"{name}.gate_proj"), self.linear(x, f"{name}.up_proj"))
        return self.linear(hidden, f"{name}.down_proj")


@pytest.mark.parametrize("name", LAYERS)
def test_saved_activations_match_the_ledger(name):
    spec = ModelSpec("tiny", 97, HIDDEN, (LAYERS[name],), 1e-5, LENGTH, norm="layernorm")
    layer = Layer(spec)
    excluded = {tensor.untyped_storage().data_ptr() for tensor in layer.weights.values()}
    storages = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        # Norms save a copy of their weight: tensors without a row for every token are parameters.
        if storage.data_ptr() not in excluded and tensor.numel() >= TOKENS:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = layer(torch.randn(ROWS, LENGTH, HIDDEN, requires_grad=True))
    sizes = {"compute": 4, "float32": 4, "int64": 8}
    saved = [act for op in ledger.layer_ops(spec, 0) for act in op.saved]
    listed = sum(prod(dim.size for dim in act.dims) * sizes[act.dtype] for act in saved) * TOKENS
    assert listed * 0.999 <= sum(storages.values()) <= listed * 1.001
    out.sum().backward()
