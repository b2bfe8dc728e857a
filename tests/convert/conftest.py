"""Tiny models on disk, written by transformers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))

from tiny_models import build_reference


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., Path]:
    """`saved(case, dtype, max_shard_size)` is a new folder with the tiny model `case` as transformers saves it."""

    def save(case: str = "llama", dtype: torch.dtype = torch.float32, max_shard_size: str = "5GB") -> Path:
        folder = tmp_path / f"{case}-source"
        build_reference(case).to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
        return folder

    return save
