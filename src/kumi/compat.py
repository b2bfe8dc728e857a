"""Functions of PyTorch that differ between 2.11, 2.12 and 2.13, or that are private. No other module depends on
PyTorch's version."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from kumi.accelerator import can


def ddp_without_buffer_sync() -> dict[str, Any]:
    """Return the argument that stops DDP from synchronising buffers: 2.13 renamed `broadcast_buffers`."""
    names = inspect.signature(DistributedDataParallel.__init__).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers": False}


def single_tensor_collectives() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the all-gather and the reduce-scatter of a single tensor.

    2.13 renamed `all_gather_into_tensor` and `reduce_scatter_tensor`.
    """
    renamed = hasattr(dist, "all_gather_single")
    names = (
        ("all_gather_single", "reduce_scatter_single")
        if renamed
        else ("all_gather_into_tensor", "reduce_scatter_tensor")
    )
    return getattr(dist, names[0]), getattr(dist, names[1])


def group_by_name(name: str) -> dist.ProcessGroup:
    """Return the process group called `name`; dispatcher operators take names of groups."""
    from torch._C._distributed_c10d import _resolve_process_group

    resolve: Callable[[Any], dist.ProcessGroup] = _resolve_process_group  # in 2.13 names have their own type
    return resolve(name)


def join_fake_world(rank: int, world_size: int) -> None:
    """Make this process `rank` of a fake world: collectives send nothing and complete at once."""
    from torch._C import _distributed_c10d
    from torch.testing._internal.distributed.fake_pg import FakeStore

    # FakeWork can be waited for, but its `is_completed` never becomes true.
    _distributed_c10d.FakeWork.is_completed = lambda self: True  # type: ignore[method-assign]
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)


def name_of_group(args: tuple[Any, ...]) -> str:
    """Return the name of the process group among `args`, the arguments of a torch.distributed operator.

    Raise TypeError when there is none.
    """
    for value in args:
        if isinstance(value, torch.ScriptObject):
            try:
                return str(dist.ProcessGroup.unbox(value).group_name)
            except (RuntimeError, TypeError):
                continue  # a ReduceOp, which is a ScriptObject too
    raise TypeError(f"no process group among the arguments {args}")


def keep_integers_in_fsdp() -> None:
    """Let FSDP2 shard integer parameters and gather them in their dtype.

    2.11 makes each shard a parameter that at first requires a gradient, which integers cannot, and casts integers to
    `MixedPrecisionPolicy.param_dtype`.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_param
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    original: Callable[..., None] = FSDPParam.init_dtype_attrs
    shard: Callable[..., None] = FSDPParam._init_sharded_param
    if getattr(original, "keeps_integers", False) or "is_floating_point" in inspect.getsource(original):
        return

    def init_dtype_attrs(param: Any, policy: Any) -> None:
        original(param, policy)
        if not param.orig_dtype.is_floating_point:
            param.param_dtype = None

    def init_sharded_param(param: Any, whole: Tensor, *args: Any) -> None:
        """Shard an integer parameter as a parameter without gradients."""
        names: Any = _fsdp_param  # during the call, this module's nn.Parameter requires no gradient
        if not whole.dtype.is_floating_point:
            names.nn = SimpleNamespace(Module=nn.Module, Parameter=partial(nn.Parameter, requires_grad=False))
        try:
            shard(param, whole, *args)
        finally:
            names.nn = nn

    init_dtype_attrs.keeps_integers = True  # type: ignore[attr-defined]
    FSDPParam.init_dtype_attrs = init_dtype_attrs  # type: ignore[method-assign, assignment]
    FSDPParam._init_sharded_param = init_sharded_param  # type: ignore[method-assign, assignment]


def reshards_after_forward(module: nn.Module) -> bool:
    """Return True if `module`, wrapped by `fully_shard`, frees its gathered parameters after each forward pass."""
    state: Any = module._get_fsdp_state()  # type: ignore[operator]
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return any(group is not None and group.post_forward_mesh_info is not None for group in groups)


def free_gather_buffer(module: nn.Module) -> None:
    """Free the buffer of FSDP2's last all-gather, whose parameters are copied out of it already.

    `module` is the root of an FSDP2 model, in its forward pass. FSDP2 frees the buffer at the end of that pass. As
    there, the streams of later all-gathers wait for the copy.
    """
    from torch.distributed.fsdp import fully_shard

    context = fully_shard.state(module)._comm_ctx  # type: ignore[attr-defined]
    last = context.all_gather_state
    if last is not None:
        context.all_gather_copy_in_stream.wait_event(last.event)
        context.all_gather_stream.wait_event(last.event)
        context.all_gather_state = None


def rerun_fsdp_post_backward(module: nn.Module) -> None:
    """Run FSDP2's post-backward of `module` again, to reduce gradients that were added after its backward pass.

    `module` is the root of an FSDP2 model. Since 2.13 a module has any number of parameter groups; in older versions it
    has one or none.
    """
    from torch.distributed.fsdp import fully_shard

    root = fully_shard.state(module)  # type: ignore[attr-defined]
    for state in root._state_ctx.all_states:
        single = getattr(state, "_fsdp_param_group", None)
        groups = getattr(state, "_fsdp_param_groups", [single] if single is not None else [])
        for group in groups:
            _complete_grads(group)
            group.post_backward()
    root._root_post_backward_final_callback()


def _complete_grads(group: Any) -> None:
    """Prepare the unsharded gradients of an FSDP2 parameter group for its reduce-scatter.

    Some gradients come from the backward pass and others were added later: convert all to the dtype of accumulation.
    FSDP2 may hold a partial sum that is reduce-scattered but not yet all-reduced over replicas. All gradients that are
    added to the sum must cover the same parameters, so fill missing gradients with zeros.
    """
    params = [param for param in group.fsdp_params if hasattr(param, "_unsharded_param")]
    for param in params:
        param.accumulate_unsharded_grad_if_needed()
        param.to_accumulated_grad_if_needed()
    has_grad = [
        param.unsharded_accumulated_grad is not None or param._unsharded_param.grad is not None for param in params
    ]
    has_partial_sum = getattr(group, "_partial_reduce_output", None) is not None
    if group.reduce_grads and has_partial_sum and (any(has_grad) or group.all_reduce_grads):
        for param, present in zip(params, has_grad, strict=True):
            if not present:
                dtype = param.reduce_dtype or param._unsharded_param.dtype
                param.unsharded_accumulated_grad = torch.zeros_like(param._unsharded_param, dtype=dtype)


def fused_rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return x / rms(x) * weight over the last dim, and 1 / rms(x), by one kernel of a GPU.

    `x` and `weight` must have the same dtype.
    """
    out, scale = torch.ops.aten._fused_rms_norm(x, [x.shape[-1]], weight, eps)
    return out, scale


def fused_rms_norm_backward(grad: Tensor, x: Tensor, scale: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of `x` and `weight`, given `grad`, the gradient of the result of `fused_rms_norm`."""
    operator = torch.ops.aten._fused_rms_norm_backward
    grad_x, grad_weight = operator(grad, x, [x.shape[-1]], scale, weight, [True, True])
    return grad_x, grad_weight


def has_varlen(q: Tensor) -> bool:
    """Return True if PyTorch's variable-length attention supports `q`: in 16 bits, on a GPU that can compute it."""
    return q.dtype in (torch.bfloat16, torch.float16) and can(q.device, "packed flash attention")


# Name of variable-length attention in PyTorch's dispatcher.
VARLEN_ATTENTION = "torch_attn::_varlen_attn"


def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, *, longest: int, window: int | None, scale: float | None = None
) -> Tensor:
    """Return causal attention (T, H, E) of `q` (T, H, E) over `k`, `v` (T, K, E), within documents.

    bounds: cumulative lengths of the documents (cu_seqlens), int32.
    longest: tokens of the longest document.
    window: tokens of a sliding window, or None.
    scale: factor of the scores; None is 1 / sqrt(E).

    Before PyTorch 2.12, which added `enable_gqa`, the key and value heads are repeated here. For a kernel without
    `scale` the queries are scaled here.
    """
    # Imported late: it imports torch's compiler, which takes longer than the rest of torch.
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {"window_size": (-1 if window is None else window - 1, 0)}
    parameters = inspect.signature(varlen_attn).parameters
    if scale is not None and "scale" in parameters:
        options["scale"] = scale
    elif scale is not None:
        q = q * (scale * q.shape[-1] ** 0.5)
    if "enable_gqa" in parameters:
        options["enable_gqa"] = True
    else:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    out = varlen_attn(q, k, v, bounds, bounds, longest, longest, **options)
    assert isinstance(out, Tensor)
    return out


def flash_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Tensor | None,
    longest_q: int,
    longest_k: int,
    *,
    causal: bool,
    window: int | None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp (float32) of flash attention of `q` over `k` and `v`.

    Without `bounds`: q (B, N, H, E), k and v (B, M, K, E), log-sum-exp (B, H, N). With `bounds`, the cumulative lengths
    of documents (int32): q (T, H, E), k and v (T, K, E), log-sum-exp (H, T). The output has the shape of `q`.
    `longest_q` and `longest_k` are the largest numbers of queries and keys in a sequence. `window` applies only to
    causal attention. `scale` multiplies the scores; None is 1 / sqrt(E).
    """
    sizes, window_left = (bounds, bounds, longest_q, longest_k), None if window is None else window - 1
    forward = torch.ops.aten._flash_attention_forward
    out, lse, *_ = forward(q, k, v, *sizes, 0.0, causal, False, scale=scale, window_size_left=window_left)
    return out, lse


def flash_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bounds: Tensor | None,
    longest_q: int,
    longest_k: int,
    *,
    causal: bool,
    window: int | None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `q`, `k` and `v`, given `grad`, the gradient of `flash_forward`'s output."""
    # The random state of the kernel's dropout, which is off, and an argument that is not used.
    rng_state, unused = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
    sizes, window_left = (bounds, bounds, longest_q, longest_k), None if window is None else window - 1
    tensors, backward = (grad, q, k, v, out, lse), torch.ops.aten._flash_attention_backward
    options = {"scale": scale, "window_size_left": window_left}
    grads: tuple[Tensor, Tensor, Tensor] = backward(*tensors, *sizes, 0.0, causal, rng_state, unused, **options)
    return grads


def activate_flash(version: str) -> None:
    """Let an installed package compute flash attention: `version` is "FA3" or "FA4"."""
    from torch.nn import attention

    attention.activate_flash_attention_impl(version)


def restore_flash() -> None:
    """Let PyTorch's own kernels compute flash attention again."""
    from torch.nn.attention import current_flash_attention_impl, restore_flash_attention_impl

    if current_flash_attention_impl() is not None:
        restore_flash_attention_impl()


def enable_symmetric_memory(group: dist.ProcessGroup) -> None:
    """Enable symmetric memory between the ranks of `group`, each with its GPU.

    Newer versions of PyTorch enable it themselves and deprecate the call.
    """
    from torch.distributed import _symmetric_memory

    enable = getattr(_symmetric_memory, "enable_symm_mem_for_group", None)
    if enable is not None and not hasattr(enable, "__deprecated__"):
        enable(group.group_name)


def all_gather_matmul(
    x: Tensor, matrices: list[Tensor], group: str, *, keep: bool
) -> tuple[Tensor | None, list[Tensor]]:
    """All-gather `x` (T/n, D) over the n ranks of `group` and multiply it by each of `matrices` (D, O), overlapped.

    Return the gathered x (T, D) if `keep`, else None, and the products, (T, O) each.
    """
    from torch.distributed import _symmetric_memory  # the import registers the operators

    assert _symmetric_memory is not None
    result: tuple[Tensor | None, list[Tensor]] = torch.ops.symm_mem.fused_all_gather_matmul(
        x, matrices, 0, group, return_A=keep
    )
    return result


def matmul_reduce_scatter(x: Tensor, matrix: Tensor, group: str) -> Tensor:
    """Multiply `x` (T, F) by `matrix` (F, O) and reduce-scatter the product over the n ranks of `group`, overlapped.

    Return this rank's shard of the sum, (T/n, O).
    """
    from torch.distributed import _symmetric_memory  # the import registers the operators

    assert _symmetric_memory is not None
    shard: Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(x, matrix, "sum", 0, group)
    return shard
