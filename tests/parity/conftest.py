"""Fixtures of comparisons with other implementations."""

import pytest


@pytest.fixture(scope="session")
def trl_models(tmp_path_factory):
    """A folder with tiny models and their tokenizer, see `trl_oracle.save_models`."""
    import trl_oracle

    folder = tmp_path_factory.mktemp("trl")
    trl_oracle.save_models(folder)
    return folder
