"""Where PyTorch 2.11 to 2.13 differ. Nothing else in kumi looks at PyTorch's version."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def ddp_without_buffer_sync() -> dict[str, Any]:
    """The argument with which DDP leaves buffers alone in the forward: 2.13 renamed `broadcast_buffers`."""
    names = inspect.signature(DistributedDataParallel.__init__).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers": False}


def one_tensor_collectives() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """All-gather into one tensor and reduce-scatter of one: 2.13 renamed `all_gather_into_tensor` and
    `reduce_scatter_tensor`."""
    renamed = hasattr(dist, "all_gather_single")
    names = (
        ("all_gather_single", "reduce_scatter_single")
        if renamed
        else ("all_gather_into_tensor", "reduce_scatter_tensor")
    )
    return getattr(dist, names[0]), getattr(dist, names[1])


def group_of(name: str) -> dist.ProcessGroup:
    """The process group that is called `name`: operators of PyTorch's dispatcher take names, not groups."""
    from torch._C._distributed_c10d import _resolve_process_group

    resolve: Callable[[Any], dist.ProcessGroup] = _resolve_process_group  # 2.13 has a type of its own for names
    return resolve(name)


def join_fake_world(rank: int, world_size: int) -> None:
    """Makes this process `rank` of a world in which collectives communicate with nobody, and are done at once."""
    from torch._C import _distributed_c10d
    from torch.testing._internal.distributed.fake_pg import FakeStore

    # It can be waited for without end, but says that it is under way for good.
    _distributed_c10d.FakeWork.is_completed = lambda self: True  # type: ignore[method-assign]
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)


def name_of_group(args: tuple[Any, ...]) -> str:
    """The name of the process group among the arguments of an operator of torch.distributed."""
    for value in args:
        if isinstance(value, torch.ScriptObject):
            try:
                return str(dist.ProcessGroup.unbox(value).group_name)
            except (RuntimeError, TypeError):
                continue  # a reduction, which is an object as well
    raise TypeError(f"no process group among {args}")


def fsdp_after_backward(module: nn.Module) -> None:
    """Does what FSDP2 does at the end of a backward pass of `module`, one that it divides: for gradients that were
    added to parameters since. 2.13 gave a module several groups of parameters; before it had one, or none."""
    from torch.distributed.fsdp import fully_shard

    root = fully_shard.state(module)  # type: ignore[attr-defined]
    for state in root._state_ctx.all_states:
        one = getattr(state, "_fsdp_param_group", None)
        groups = getattr(state, "_fsdp_param_groups", [one] if one is not None else [])
        for group in groups:
            _complete(group)
            group.post_backward()
    root._root_post_backward_final_callback()


def _complete(group: Any) -> None:
    """Brings the gradients of a group of FSDP2 into the dtype of sums, where some came before and others after, and
    fills in zeros for those that are missing where FSDP2 adds up sums that it has not yet reduced over replicas: these
    must be of the same parameters every time."""
    params = [one for one in group.fsdp_params if hasattr(one, "_unsharded_param")]
    for one in params:
        one.accumulate_unsharded_grad_if_needed()
        one.to_accumulated_grad_if_needed()
    found = [one.unsharded_accumulated_grad is not None or one._unsharded_param.grad is not None for one in params]
    waiting = getattr(group, "_partial_reduce_output", None) is not None
    if group.reduce_grads and waiting and (any(found) or group.all_reduce_grads):
        for one, there in zip(params, found, strict=True):
            if not there:
                dtype = one.reduce_dtype or one._unsharded_param.dtype
                one.unsharded_accumulated_grad = torch.zeros_like(one._unsharded_param, dtype=dtype)


def has_varlen(q: Tensor) -> bool:
    """Whether PyTorch's variable-length attention takes queries like `q`: 16-bit, on an Ampere or newer GPU."""
    return (
        q.is_cuda
        and q.dtype in (torch.bfloat16, torch.float16)
        and torch.cuda.get_device_capability(q.device) >= (8, 0)
    )


# What PyTorch's dispatcher calls it.
VARLEN_ATTENTION = "torch_attn::_varlen_attn"


def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, *, longest: int, window: int | None, scale: float | None = None
) -> Tensor:
    """Causal attention (T, H, E) of `q` (T, H, E) over `k`, `v` (T, K, E) within the documents that begin at `bounds`;
    scores are multiplied by `scale`, 1 / sqrt(E) where that is None.

    2.12 added `enable_gqa`; 2.11 needs as many key heads as query heads. `scale` is given where it is not the default,
    and multiplied into queries where the kernel does not take it.
    """
    # Imported here because it imports torch's compiler, which takes longer than the rest of torch.
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {"window_size": (-1 if window is None else window - 1, 0)}
    known = inspect.signature(varlen_attn).parameters
    if scale is not None and "scale" in known:
        options["scale"] = scale
    elif scale is not None:
        q = q * (scale * q.shape[-1] ** 0.5)
    if "enable_gqa" in known:
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
    """The result like `q` and the log-sum-exp, float32, of attention of `q` (B, N, H, E) over `k` and `v` (B, M, K, E),
    (B, H, N); or, within the documents of (T, H, E) and (T, K, E) that begin at `bounds` (int32), (H, T). A `window`
    is of causal attention; scores are multiplied by `scale`, 1 / sqrt(E) where that is None."""
    sizes, left = (bounds, bounds, longest_q, longest_k), None if window is None else window - 1
    forward = torch.ops.aten._flash_attention_forward
    out, lse, *_ = forward(q, k, v, *sizes, 0.0, causal, False, scale=scale, window_size_left=left)
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
    """The gradients of `q`, `k` and `v`, given those of `flash_forward`'s result."""
    # What a kernel with dropout would draw from; there is none.
    drawn, unused = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
    sizes, left = (bounds, bounds, longest_q, longest_k), None if window is None else window - 1
    tensors, backward = (grad, q, k, v, out, lse), torch.ops.aten._flash_attention_backward
    options = {"scale": scale, "window_size_left": left}
    found: tuple[Tensor, Tensor, Tensor] = backward(*tensors, *sizes, 0.0, causal, drawn, unused, **options)
    return found


def share_memory(group: dist.ProcessGroup) -> None:
    """Lets the ranks of `group`, each with a GPU, read each other's memory. PyTorch needs no telling from the version
    on that deprecates it."""
    from torch.distributed import _symmetric_memory

    enable = getattr(_symmetric_memory, "enable_symm_mem_for_group", None)
    if enable is not None and not hasattr(enable, "__deprecated__"):
        enable(group.group_name)


def gathered_products(
    x: Tensor, matrices: list[Tensor], group: str, *, keep: bool
) -> tuple[Tensor | None, list[Tensor]]:
    """The products with each of `matrices` (D, O) of the parts `x` (T/n, D) of all ranks, (T, O), fetched while others
    are multiplied; and the parts themselves, (T, D), for those who `keep` them."""
    from torch.distributed import _symmetric_memory  # it defines the operators

    assert _symmetric_memory is not None
    made: tuple[Tensor | None, list[Tensor]] = torch.ops.symm_mem.fused_all_gather_matmul(
        x, matrices, 0, group, return_A=keep
    )
    return made


def scattered_product(x: Tensor, matrix: Tensor, group: str) -> Tensor:
    """This rank's part (T/n, O) of the sum over ranks of `x` (T, F) times `matrix` (F, O), sent while other parts are
    multiplied."""
    from torch.distributed import _symmetric_memory  # it defines the operators

    assert _symmetric_memory is not None
    made: Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(x, matrix, "sum", 0, group)
    return made
