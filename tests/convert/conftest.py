"""Tiny models on disk, written by transformers."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from tiny_models import build_reference


@pytest.fixture(scope="session")
def saved_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`saved_once(case, dtype, max_shard_size)` is a folder with the tiny model `case`, which no test may change."""

    @cache
    def save(case: str, dtype: torch.dtype, max_shard_size: str) -> Path:
        folder = tmp_path_factory.mktemp("saved")
        build_reference(case).to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
        return folder

    return save


@pytest.fixture
def saved(tmp_path: Path, saved_once: Callable[..., Path]) -> Callable[..., Path]:
    """`saved(case, dtype, max_shard_size)` is a new folder with the tiny model `case` as transformers saves it."""

    def save(case: str = "llama", dtype: torch.dtype = torch.float32, max_shard_size: str = "5GB") -> Path:
        source = saved_once(case, dtype, max_shard_size)
        return shutil.copytree(source, tmp_path / f"{case}-source", dirs_exist_ok=True)

    return save
