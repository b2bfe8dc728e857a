"""A hub on this machine that huggingface_hub talks to, with an empty cache."""

import pytest
from fake_hub import serve

from kumi.hub.datasets import fetch_dataset


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The hub; nobody is logged in."""
    from huggingface_hub import constants

    with serve() as served:
        monkeypatch.setattr(constants, "ENDPOINT", served.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", served.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        monkeypatch.delenv("HF_TOKEN", raising=False)
        fetch_dataset.cache_clear()
        yield served
        fetch_dataset.cache_clear()
