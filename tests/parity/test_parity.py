"""Every family against transformers on tiny random weights: logits, loss, gradients, names, shapes."""

from __future__ import annotations

import importlib
from functools import cache
from math import prod

import pytest
import torch
import torch.nn.functional as F
from rounding import rounding
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from kumi.nn.attention import cpu_attention
from kumi.spec import ledger
from tiny_models import BIASES, CASES, build_pair, build_reference, in_float64, native


@cache
def decoder_of_case(name):
    """The case in kumi, made once for the tests that compute no gradients."""
    return build_pair(name)[1]


@pytest.mark.parametrize("name", CASES)
def test_logits_loss_and_gradients(name):
    reference, decoder = build_pair(name)
    ids = torch.randint(0, decoder.spec.vocab_size, (2, 24), generator=torch.Generator().manual_seed(1))
    expected = reference(input_ids=ids, use_cache=False).logits
    assert (decoder(ids) - expected).abs().max() <= 1e-5

    labels = ids.roll(-1, dims=1)
    loss = F.cross_entropy(expected.flatten(0, 1), labels.flatten())
    loss.backward()
    total, log_probs = decoder(ids, labels=labels, token_weights=torch.full(labels.shape, 1 / labels.numel()))
    (-total).backward()
    torch.testing.assert_close(-total, loss, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(-log_probs.mean(), loss, rtol=1e-6, atol=1e-6)
    apart = _apart(reference, decoder, 1e-7)
    if not apart:
        return

    def gradients(model):
        model.zero_grad()
        logits = model(input_ids=ids, use_cache=False).logits
        F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
        return _gradients(model, decoder)

    with in_float64():
        wide = build_reference(name)
    wide.load_state_dict(reference.state_dict())
    allowed = rounding(wide, 24, gradients)
    assert {key: difference for key, difference in apart.items() if difference > allowed[key]} == {}


def test_longrope_is_chosen_by_the_document_in_rows_longer_than_the_original_context():
    """Packed documents shorter and longer than the context of 16 train as transformers does on each by itself."""
    reference, decoder = build_pair("phi3-longrope")
    sizes = [7, 16, 17, 20, 25, 5, 14, 16]
    flat = torch.randint(0, decoder.spec.vocab_size, (120,), generator=torch.Generator().manual_seed(1))
    alone = flat.split(sizes)
    targets = [document.roll(-1) for document in alone]
    logits = [reference(input_ids=document[None], use_cache=False).logits[0] for document in alone]
    expected = [F.cross_entropy(*pair, reduction="sum") / 120 for pair in zip(logits, targets)]
    ids, labels = flat.view(2, 60), torch.cat(targets).view(2, 60)
    documents = torch.arange(8).repeat_interleave(torch.tensor(sizes)).view(2, 60)
    loss = torch.stack(expected).sum()
    loss.backward()
    weights = torch.full(ids.shape, 1 / 120)
    total, _ = decoder(ids, document_ids=documents, labels=labels, token_weights=weights)
    (-total).backward()
    torch.testing.assert_close(-total, loss, rtol=1e-6, atol=1e-6)
    _same_gradients(reference, decoder, 1e-7)


def _same_gradients(reference, decoder, least):
    assert _apart(reference, decoder, least) == {}


def _apart(reference, decoder, least):
    """Return the differences of gradients beyond 1e-5 of the largest one of their tensor, plus `least`."""
    theirs = _gradients(reference, decoder)
    apart = {key: (value.grad - theirs[key]).abs().max() for key, value in decoder.named_parameters()}
    return {key: far for key, far in apart.items() if far > 1e-5 * theirs[key].abs().max() + least}


def _gradients(reference, decoder):
    """Return the gradients of transformers' model under kumi's names."""
    grads = {key: value.grad for key, value in reference.named_parameters()}
    # A bias that only chooses has none.
    choosing = {key: torch.zeros_like(buffer) for key, buffer in reference.named_buffers() if key.endswith(BIASES)}
    return native(decoder.spec, grads | choosing)


@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral", "olmoe", "qwen2-moe"])
def test_the_auxiliary_loss(name):
    """The auxiliary loss of the last layer is that of transformers.

    For several layers, transformers multiplies the choices of all layers with their mean scores; kumi's loss is the
    mean of the layers' losses.
    """
    reference, decoder = build_pair(name)
    last, coef = decoder.spec.layers[-1].mlp, 3.0
    balance = list(decoder.model.layers.values())[-1].mlp.gate.balance
    ids = torch.randint(0, decoder.spec.vocab_size, (2, 24), generator=torch.Generator().manual_seed(1))
    out = reference(input_ids=ids, use_cache=False, output_router_logits=True)
    formula = importlib.import_module(type(reference).__module__).load_balancing_loss_func
    aux = formula(out.router_logits[-1:], last.num_experts, last.num_experts_per_tok)
    loss = F.cross_entropy(out.logits.flatten(0, 1), ids.roll(-1, dims=1).flatten())
    (loss + coef * aux).backward()
    balance.weight = coef / ids.numel()
    total, _ = decoder(ids, labels=ids.roll(-1, dims=1), token_weights=torch.full(ids.shape, 1 / ids.numel()))
    (-total).backward()
    torch.testing.assert_close(balance.loss, coef * aux.detach(), rtol=1e-5, atol=1e-6)
    _same_gradients(reference, decoder, 1e-6)


@pytest.mark.parametrize("name", CASES)
def test_ledger_has_the_parameters_of_the_module(name):
    decoder = decoder_of_case(name)
    listed = {param.name: param.shape for param in ledger.params(decoder.spec)}
    assert listed == {key: tuple(value.shape) for key, value in decoder.named_parameters()}
    listed = {buffer.name: buffer.shape for buffer in ledger.buffers(decoder.spec)}
    assert listed == {key: tuple(value.shape) for key, value in decoder.named_buffers()}


@pytest.mark.parametrize("name", CASES)
def test_ledger_counts_the_flops_of_the_forward_pass(name):
    decoder = decoder_of_case(name)
    ids = torch.zeros(2, 24, dtype=torch.int64)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        decoder(ids)
    assert counter.get_total_flops() == ledger.forward_flops(decoder.spec, tokens=48, seq_len=24)


class _InBlocks(TorchDispatchMode):
    """A mode that counts the bytes of the log-sum-exp that other kernels save and attention in blocks does not."""

    statistics = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator is cpu_attention.PACKED_ATTENTION:
            batch, length, heads, _ = args[0].shape
            self.statistics += 4 * batch * length * heads
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "llama-biases",
        "qwen2-tied",
        "qwen3-window",
        "mixtral",
        "olmoe",
        "qwen2-moe",
        "qwen3-moe-norm",
        "deepseek-v2",
        "deepseek-v2-lite",
        "deepseek-v3",
        "nemotron-h",
        "nemotron-h-moe",
        "olmo2",
        "phi3-partial",
        "phi3-longrope",
        "gemma2",
        "gemma3",
        "gpt-oss",
        "gpt-neox",
        "gpt2",
        "gpt2-wide",
        "falcon-groups",
        "falcon-in-turn",
        "bloom",
    ],
)
def test_ledger_counts_the_activations_that_are_kept(name):
    decoder = decoder_of_case(name)
    ids, tokens = torch.zeros(2, 24, dtype=torch.int64), 48
    parameters = {parameter.untyped_storage().data_ptr() for parameter in decoder.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    blocks = _InBlocks()
    with blocks, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        places = torch.arange(24).repeat(2, 1)
        total, _ = decoder(ids, position_ids=places, labels=ids, token_weights=torch.full(ids.shape, 1.0))
    ops = ledger.ops(decoder.spec)
    sizes = {"compute": 4, "float32": 4, "int64": 8}
    listed = sum(prod(dim.size for dim in act.dims) * sizes[act.dtype] for op in ops for act in op.saved) * tokens
    listed -= blocks.statistics
    # Whatever the number of tokens: the gradient of the head, formed in the forward pass, its scale, and how many rows
    # every expert has (int64) and at which row they end (int32).
    once = 4 * decoder.head_weight.numel() + 4 + (8 + 4) * sum(op.target.size for op in ops if op.kind == "router")
    assert sum(saved.values()) == listed + once
    total.backward()
