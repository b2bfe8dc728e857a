"""The operations of x + mlp(norm(x)), dense or a mixture of experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kumi.spec.model import MLP, LayerSpec, ModelSpec, MoE
from kumi.spec.op import Activation, Dim, Op, Param, block_norm, linear

# Activation functions whose backward needs only their output, which the next matrix saves.
_SAVES_ONLY_OUTPUT = ("relu",)


def mlp_ops(spec: ModelSpec, layer: LayerSpec, prefix: str) -> Iterator[Op]:
    """Yield the operations of the MLP or the experts of the layer called `prefix`, in order.

    Yield nothing for a layer that has neither.
    """
    if layer.mlp is None:
        return
    embed, name = Dim("embed", spec.hidden_size), f"{prefix}.mlp"
    if layer.pre_norms and not layer.shared_norm:
        # The two norms of a parallel layer have the same input, which the first one saves.
        yield block_norm(spec, f"{prefix}.post_attention_layernorm", embed, keeps_input=not layer.parallel)
    if isinstance(layer.mlp, MoE):
        yield from _expert_ops(spec, layer.mlp, name)
    else:
        yield from _dense_ops(spec, layer.mlp, name, keeps_input=not layer.shared_norm)
    if layer.post_norms:
        yield block_norm(spec, f"{prefix}.mlp_post_norm", embed)
    yield Op(f"{name}.add", "add", embed, embed)


def _dense_ops(spec: ModelSpec, mlp: MLP, name: str, *, keeps_input: bool = True) -> Iterator[Op]:
    """Yield two matrices with an activation between them, or three matrices with a gated activation."""
    embed, ffn = Dim("embed", spec.hidden_size), Dim("ffn", mlp.intermediate_size)
    saved = (Activation((embed,)),) if keeps_input else ()
    if mlp.gated:
        yield linear(f"{name}.gate_proj", embed, ffn, bias=mlp.bias, saved=saved)
        yield linear(f"{name}.up_proj", embed, ffn, bias=mlp.bias)
        yield Op(f"{name}.gate", "gate", ffn, ffn, saved=(Activation((ffn,)), Activation((ffn,))))
    else:
        yield linear(f"{name}.up_proj", embed, ffn, bias=mlp.bias, saved=saved)
        inputs = () if mlp.hidden_act in _SAVES_ONLY_OUTPUT else (Activation((ffn,)),)
        yield Op(f"{name}.activation", "activation", ffn, ffn, saved=inputs)
    yield linear(f"{name}.down_proj", ffn, embed, bias=mlp.bias, saved=(Activation((ffn,)),))


def _expert_ops(spec: ModelSpec, moe: MoE, name: str) -> Iterator[Op]:
    """Yield router, dispatch, routed experts, combine, and the shared expert.

    No token is dropped: each token has a row for each of its `num_experts_per_tok` experts. The expert's output for
    each row is saved for the gradient of the row's routing weight.
    """
    embed, per_token = Dim("embed", spec.hidden_size), moe.num_experts_per_tok
    scores, routed = Dim("scores", moe.num_experts), Dim("routed", per_token)
    inputs = (Activation((embed,)), Activation((scores,), "float32"))
    # Hugging Face calls the router "gate". The gated activation of a dense MLP, of the kind "gate", has the same name.
    router = linear(f"{name}.gate", embed, scores, bias=moe.bias, saved=inputs, kind="router")
    bias = Param(f"{router.name}.e_score_correction_bias", (scores,), "zeros")
    yield replace(router, buffers=(bias,) if moe.has_correction_bias else ())
    # The expert of each row, and the position of the row after sorting by expert.
    indices = (Activation((routed,), "int64"), Activation((routed,), "int64"))
    yield Op(f"{name}.dispatch", "dispatch", embed, embed, saved=indices, passes=per_token)
    yield from _expert_matrices(spec, moe, f"{name}.experts", routed)
    results = (Activation((routed, embed)), Activation((routed,), "float32"))
    yield Op(f"{name}.combine", "combine", embed, embed, saved=results, passes=per_token)
    if moe.shared_intermediate_size:
        # The router saves the input already.
        shared = MLP(moe.shared_intermediate_size, hidden_act=moe.hidden_act, gated=moe.gated)
        yield from _dense_ops(spec, shared, f"{name}.shared_experts", keeps_input=False)
        if moe.shared_gate:
            scalar = Dim("one", 1)
            yield linear(f"{name}.shared_expert_gate", embed, scalar)
            inputs = (Activation((embed,)), Activation((scalar,)))
            yield Op(f"{name}.shared_experts.scale", "activation", embed, embed, saved=inputs)
        yield Op(f"{name}.shared_experts.add", "add", embed, embed)


def _expert_matrices(spec: ModelSpec, moe: MoE, name: str, routed: Dim) -> Iterator[Op]:
    """Yield the matmuls of all experts. Gate and up are fused to one matrix, and all experts to one tensor."""
    embed, ffn = Dim("embed", spec.hidden_size), Dim("ffn", moe.moe_intermediate_size)
    saved_input, saved_hidden = Activation((routed, embed)), Activation((routed, ffn))
    if moe.gated:
        yield _grouped_matmul(moe, f"{name}.gate_up_proj", embed, _fused_pair(ffn), saved_input)
        yield Op(f"{name}.gate", "gate", ffn, ffn, saved=(saved_hidden, saved_hidden), passes=routed.size)
    else:
        yield _grouped_matmul(moe, f"{name}.up_proj", embed, ffn, saved_input)
        inputs = () if moe.hidden_act in _SAVES_ONLY_OUTPUT else (saved_hidden,)
        yield Op(f"{name}.activation", "activation", ffn, ffn, saved=inputs, passes=routed.size)
    yield _grouped_matmul(moe, f"{name}.down_proj", ffn, embed, saved_hidden)


def _grouped_matmul(moe: MoE, name: str, source: Dim, target: Dim, saved: Activation) -> Op:
    """Return the grouped matmul of all experts from `source` to `target`."""
    experts = Dim("experts", moe.num_experts)
    params: tuple[Param, ...] = (Param(name, (experts, target, source)),)
    if moe.bias:
        params = (*params, Param(f"{name}_bias", (experts, target), "zeros"))
    return Op(name, "linear", source, target, params, (saved,), moe.num_experts_per_tok, moe.num_experts)


def _fused_pair(dim: Dim) -> Dim:
    """Return the dim of two matrices with the dim `dim` that are fused along it: twice its size.

    Its unit doubles as well, so that a shard has the same indices of both matrices.
    """
    return Dim(dim.name, 2 * dim.size, 2 * dim.unit)
