"""The words for how a CPU computes."""

from itertools import combinations, product

import pytest

from kumi.spec.numerics import (
    AUTO_KINDS,
    CHOICES,
    FLASH_CASES,
    MATMUL_LIBRARIES,
    REFERENCE,
    Numerics,
    attention_case,
    kernels_text,
    parse_kernels,
    parse_numerics,
)

FLASH = [chosen for count in range(len(FLASH_CASES) + 1) for chosen in combinations(FLASH_CASES, count)]


@pytest.mark.parametrize(("kind", "products"), list(product(("", *AUTO_KINDS), MATMUL_LIBRARIES)))
def test_what_is_written_is_read(kind, products):
    every = [Numerics(kind, products, flash) for flash in FLASH]
    assert [parse_numerics(str(one)) for one in every] == every
    assert len({str(one) for one in every}) == len(every)


def test_the_reference_has_a_word():
    assert str(REFERENCE) == "reference"
    assert parse_numerics("reference") == parse_numerics("flash=none  products=onednn") == REFERENCE
    assert parse_numerics("products=default flash=bf16-long,fp32-short").flash == ("fp32-short", "bf16-long")


def test_kernels_of_a_gpu():
    every = [
        tuple(zip(operations, implementations))
        for count in range(len(CHOICES) + 1)
        for operations in combinations(CHOICES, count)
        for implementations in product(*(CHOICES[operation] for operation in operations))
    ]
    assert [parse_kernels(kernels_text(kernels)) for kernels in every] == every
    assert [parse_numerics(str(Numerics(kernels=kernels))).kernels for kernels in every] == every
    assert parse_kernels("scan:mamba-ssm, loss:triton") == (("loss", "triton"), ("scan", "mamba-ssm"))
    assert parse_kernels("torch") == ()
    chosen = Numerics(kernels=parse_kernels("compile:off,attention:masked"))
    assert str(chosen) == "kernels=attention:masked,compile:off"
    assert (chosen.chosen("attention"), chosen.chosen("float8")) == ("masked", None)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("loss", "'loss' is unknown; write 'torch', or some of loss:triton, "),
        ("loss:mamba-ssm", "'loss:mamba-ssm' is unknown"),
        ("torch,loss:triton", "'torch' is unknown"),
        ("", "'' is unknown"),
        ("scan:triton,scan:mamba-ssm", "'scan:mamba-ssm' occurs twice"),
    ],
)
def test_wrong_kernels_are_refused(text, reason):
    with pytest.raises(ValueError, match=reason):
        parse_kernels(text)


def test_wrong_kernels_among_numerics_have_their_key():
    with pytest.raises(ValueError, match="kernels: 'loss:tritn' is unknown"):
        parse_numerics("kernels=loss:tritn")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("references", "'references' must be one of kind=, products=, flash= and kernels=, each at most once"),
        ("product=default flash=none", "'product=default' must be one of"),
        ("products=default products=onednn flash=none", "'products=onednn' must be one of"),
        ("products=mkl flash=none", "products=mkl is unknown, use one of onednn, default, mixed"),
        (
            "kernels=loss:triton products=onednn",
            "kernels= is for GPUs, and 'kernels=loss:triton products=onednn' has words for CPUs, too",
        ),
        ("products=onednn flash=fp32", "flash=fp32 is unknown, use one of fp32-short"),
        ("products=onednn flash=", "flash= is unknown"),
        ("kind=fp16 products=onednn flash=none", "kind=fp16 is unknown, use one of fp32, bf16"),
        ("kind=fp32", "'kind=fp32' lacks flash and products"),
        ("", "'' lacks flash and products"),
    ],
)
def test_other_words_are_refused(text, reason):
    with pytest.raises(ValueError, match="as in 'kind=fp32 products=default") as caught:
        parse_numerics(text)
    assert str(caught.value).startswith(reason)


@pytest.mark.parametrize(
    ("itemsize", "length", "case"),
    [(4, 1023.9, "fp32-short"), (8, 1024, "fp32-long"), (2, 1, "bf16-short"), (2, 5000, "bf16-long")],
)
def test_the_cases_of_attention(itemsize, length, case):
    assert attention_case(itemsize, length) == case
