"""The choice of the float32 matmul."""

import pytest
import torch

from kumi.nn import cpu_matmul


@pytest.fixture(autouse=True)
def _restore():
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(("errors", "precision"), [((2e-7, 6e-7), "medium"), ((2e-7, 4e-3), "highest")])
def test_an_inaccurate_product_is_not_chosen(monkeypatch, errors, precision):
    remaining = iter(errors)
    monkeypatch.setattr(cpu_matmul, "_error", lambda: next(remaining))
    choice = cpu_matmul.enable_fast_float32()
    assert (choice.precision, torch.get_float32_matmul_precision()) == (precision, precision)
    assert precision in str(choice)


def test_what_is_chosen_here_is_accurate():
    cpu_matmul.enable_fast_float32()
    assert cpu_matmul._error() < 3e-6
