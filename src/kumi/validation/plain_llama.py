"""A plain PyTorch Llama and its training step, to compare kumi with: what a user writes with PyTorch's own modules.

Float32 weights and AdamW states under bfloat16 autocast, SDPA, the complete logits, fused AdamW. A row is one document.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kumi.validation.fitting_case import StepCase


class PlainLayer(nn.Module):
    """A layer of Llama: attention with rotary embeddings and grouped keys, then SwiGLU."""

    def __init__(self, config: dict[str, Any], device: torch.device) -> None:
        super().__init__()
        hidden, wide = config["hidden_size"], config["intermediate_size"]
        self.heads, self.kv_heads, self.size = (
            config["num_attention_heads"],
            config["num_key_value_heads"],
            config["head_dim"],
        )

        def linear(rows: int, columns: int) -> nn.Linear:
            return nn.Linear(rows, columns, bias=False, device=device)

        self.norm_1, self.norm_2 = (nn.RMSNorm(hidden, eps=1e-5, device=device) for _ in range(2))
        self.q = linear(hidden, self.heads * self.size)
        self.k, self.v = (linear(hidden, self.kv_heads * self.size) for _ in range(2))
        self.out = linear(self.heads * self.size, hidden)
        self.gate, self.up, self.down = linear(hidden, wide), linear(hidden, wide), linear(wide, hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the layer's result (B, S, D) for hidden states `x` (B, S, D), rotated by `cos` and `sin` (S, E)."""
        normed = self.norm_1(x)
        q, k, v = (self._split(layer(normed)) for layer in (self.q, self.k, self.v))
        q, k = (_rotated(states, cos, sin) for states in (q, k))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        normed = self.norm_2(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))  # type: ignore[no-any-return]

    def _split(self, states: Tensor) -> Tensor:
        return states.view(*states.shape[:2], -1, self.size).transpose(1, 2)


class PlainLlama(nn.Module):
    """A decoder of plain layers. Returns the logits."""

    def __init__(self, config: dict[str, Any], device: torch.device) -> None:
        super().__init__()
        self.table = nn.Embedding(config["vocab_size"], config["hidden_size"], device=device)
        self.layers = nn.ModuleList(PlainLayer(config, device) for _ in range(config["num_hidden_layers"]))
        self.norm = nn.RMSNorm(config["hidden_size"], eps=1e-5, device=device)
        self.head = nn.Linear(config["hidden_size"], config["vocab_size"], bias=False, device=device)
        if config["tie_word_embeddings"]:
            self.head.weight = self.table.weight
        for weight in self.parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, std=0.02)
        self.size = config["head_dim"]

    def forward(self, ids: Tensor, recompute: bool) -> Tensor:
        """Return the logits (B, S, V) of tokens `ids` (B, S)."""
        angles = torch.outer(
            torch.arange(ids.shape[1], device=ids.device),
            1 / 500000 ** (torch.arange(0, self.size, 2, device=ids.device) / self.size),
        ).repeat(1, 2)
        x, cos, sin = self.table(ids), angles.cos(), angles.sin()
        for layer in self.layers:
            x = checkpoint(layer, x, cos, sin, use_reentrant=False) if recompute else layer(x, cos, sin)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    return (x.float() * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


def make_plain_step(case: StepCase, device: torch.device) -> Callable[[], Tensor]:
    """Return the plain training step of the shape and sizes of `case`, compiled and recomputed likewise."""
    model = PlainLlama(case.model, device)
    if case.compile:
        for layer in model.layers:
            layer.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    ids = torch.randint(case.model["vocab_size"], (case.microbatch, case.seq_len + 1), device=device)

    def step() -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(ids[:, :-1], case.recompute == "full")
            loss = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
        del logits
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step
