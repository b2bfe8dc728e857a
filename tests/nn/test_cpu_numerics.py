"""The numerics of this process, and the measurement that chooses them."""

import pytest
import torch

from kumi.nn import cpu_matmul, fastest_numerics, numerics
from kumi.nn.grouped_gemm import grouped_linear
from kumi.spec.numerics import REFERENCE, Numerics


@pytest.fixture(autouse=True)
def _restore(monkeypatch):
    before = torch.get_float32_matmul_precision()
    monkeypatch.setattr(numerics, "_flash", frozenset())
    monkeypatch.setattr(numerics, "_mixed", False)
    yield
    torch.set_float32_matmul_precision(before)


def test_products_go_where_they_are_said_to(monkeypatch):
    monkeypatch.setattr(cpu_matmul, "_error", lambda: 1e-7)
    for products, *precisions in (
        ("onednn", "medium", "medium"),
        ("default", "highest", "highest"),
        ("mixed", "medium", "highest"),
    ):
        numerics.use_numerics(Numerics(products=products))
        usual = torch.get_float32_matmul_precision()
        with numerics.expert_matmul_precision():
            assert [usual, torch.get_float32_matmul_precision()] == precisions
        assert torch.get_float32_matmul_precision() == usual
        with numerics.small_matmul_precision():
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == usual
    errors = iter((1e-7, 1e-3))
    monkeypatch.setattr(cpu_matmul, "_error", lambda: next(errors))
    numerics.use_numerics(REFERENCE)
    assert torch.get_float32_matmul_precision() == "highest", "an inexact product is not used, whatever was chosen"


def test_products_of_experts_are_the_same_either_way():
    rows, weight = torch.randn(50, 24, requires_grad=True), torch.randn(3, 16, 24, requires_grad=True)
    counts = torch.tensor([0, 19, 31])
    results = []
    for products in ("default", "onednn", "mixed"):
        numerics.use_numerics(Numerics(products=products))
        out = grouped_linear(rows, weight, counts)
        results.append((out, *torch.autograd.grad(out.square().sum(), (rows, weight))))
    for other in results[1:]:
        torch.testing.assert_close(other, results[0])
    assert all(map(torch.equal, results[0], results[2]))


def test_attention_goes_where_it_is_said_to():
    numerics.use_numerics(Numerics(flash=("fp32-long", "bf16-short")))
    cases = [(torch.float32, 10), (torch.float64, 2000), (torch.bfloat16, 10), (torch.float16, 2000)]
    assert [numerics.uses_flash(*case) for case in cases] == [False, True, True, False]


def chosen(monkeypatch, kind="fp32", **seconds):
    """Return the choice if matmuls, formats, attention in each case and a layer take `seconds`; by default 1."""

    def ways(what, *names):
        return lambda *_: dict.fromkeys(names, 1.0) | seconds.get(what, {})

    class Clock(fastest_numerics._Clock):
        def timed(self, measurement, candidates):
            times = {candidate: [each] * fastest_numerics.ROUNDS for candidate, each in candidates.items()}
            return self._rounds.setdefault(measurement, times)

    monkeypatch.setattr(fastest_numerics, "_Clock", Clock)
    monkeypatch.setattr(fastest_numerics, "_products", ways("products", "default", "onednn"))
    monkeypatch.setattr(fastest_numerics, "_formats", ways("formats", "fp32", "bf16"))
    monkeypatch.setattr(fastest_numerics, "_attention", lambda case: ways(case.replace("-", "_"), "blocks", "flash")())
    monkeypatch.setattr(fastest_numerics, "_steps", ways("layer", "fp32", "bf16"))
    return fastest_numerics.measure(kind)[0]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, Numerics("fp32", "mixed")),
        ({"products": {"default": 0.96}}, Numerics("fp32", "mixed")),
        ({"products": {"default": 0.9}}, Numerics("fp32", "default")),
        ({"products": {"onednn": 0.9}}, Numerics("fp32", "mixed")),
        ({"products": {"onednn": 0.8}}, Numerics("fp32", "onednn")),
        ({"fp32_long": {"flash": 0.9}}, Numerics("fp32", "mixed", ("fp32-long",))),
        ({"bf16_short": {"flash": 0.96}}, Numerics("fp32", "mixed")),
        ({"layer": {"bf16": 0.5}}, Numerics("bf16", "mixed")),
        ({"layer": {"bf16": 0.96}}, Numerics("fp32", "mixed")),
        # If matmuls in bfloat16 take twice as long, it is not timed any further.
        ({"formats": {"bf16": 3.0}}, Numerics("fp32", "mixed", ("bf16-short", "bf16-long"))),
    ],
)
def test_another_way_needs_a_lead_of_five_percent(monkeypatch, changes, expected):
    assert chosen(monkeypatch, **changes) == expected


def test_the_precision_of_the_cpu_stays_unless_the_other_is_ahead(monkeypatch):
    assert chosen(monkeypatch, "bf16").kind == "bf16"
    assert chosen(monkeypatch, "bf16", layer={"fp32": 0.9}).kind == "fp32"
    assert chosen(monkeypatch, "bf16", formats={"bf16": 3.0}).kind == "fp32"


def test_a_lead_has_to_be_of_the_fastest_round_too():
    rounds = {"blocks": [1.0, 5.0, 5.0], "flash": [1.0, 1.0, 1.0]}
    assert fastest_numerics._ahead(rounds, "blocks", ("flash",)) == "blocks"
    assert fastest_numerics._ahead(rounds | {"flash": [0.9, 0.9, 6.0]}, "blocks", ("flash",)) == "flash"
    assert fastest_numerics._library({"default": [1.0]}) == "default", "what is not exact is not timed"


def test_the_ways_have_their_turns():
    turns = []
    seconds = fastest_numerics._Clock().timed("what", {way: lambda way=way: turns.append(way) for way in "ab"})
    assert turns == ["a", "b"] * (fastest_numerics.ROUNDS + 1)
    assert {way: len(each) for way, each in seconds.items()} == dict.fromkeys("ab", fastest_numerics.ROUNDS)


def test_attention_is_timed_with_the_products_that_were_chosen(monkeypatch):
    seen = []
    monkeypatch.setattr(cpu_matmul, "_error", lambda: 1e-7)
    monkeypatch.setattr(fastest_numerics, "ROUNDS", 1)
    attention = fastest_numerics._attention
    precision_of = torch.get_float32_matmul_precision
    monkeypatch.setattr(fastest_numerics, "_attention", lambda case: seen.append(precision_of()) or attention(case))
    for products, precision in (("default", "highest"), ("onednn", "medium"), ("mixed", "medium")):
        monkeypatch.setattr(fastest_numerics, "_library", lambda rounds, products=products: products)
        fastest_numerics.measure("fp32")
        assert set(seen) == {precision}
        seen.clear()


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_what_takes_too_long_stays_as_in_the_reference(monkeypatch, kind):
    monkeypatch.setattr(fastest_numerics, "SECONDS", 0.0)
    numerics, seconds = fastest_numerics.measure(kind)
    assert numerics == Numerics(kind)
    assert not any(seconds.values())
    now = iter((0.0, 0.0, 0.1, 0.2, 0.3, 5.0))
    monkeypatch.setattr(fastest_numerics, "SECONDS", 1.0)
    monkeypatch.setattr(fastest_numerics.time, "perf_counter", lambda: next(now))
    clock = fastest_numerics._Clock()
    assert clock.timed("what", {"a": int, "b": int}) == {}
    assert clock.medians() == {"what": {}}


def test_a_measurement_here(monkeypatch):
    monkeypatch.setattr(fastest_numerics, "SECONDS", 600.0)
    numerics, seconds = fastest_numerics.measure("fp32")
    assert numerics.kind in ("fp32", "bf16")
    assert "default" in seconds["products"]
    for case in ("fp32-short", "fp32-long"):
        ways = seconds[f"attention {case}"]
        assert (case in numerics.flash) <= (ways["flash"] * fastest_numerics.LEAD <= ways["blocks"])
    assert all(one > 0 for ways in seconds.values() for one in ways.values())
