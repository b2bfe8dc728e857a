"""The words for how a CPU computes."""

from itertools import combinations, product

import pytest

from kumi.spec.numerics import (
    AUTO_KINDS,
    FLASH_CASES,
    MATMUL_LIBRARIES,
    REFERENCE,
    Numerics,
    attention_case,
    parse_numerics,
)

CHOICES = [chosen for count in range(len(FLASH_CASES) + 1) for chosen in combinations(FLASH_CASES, count)]


@pytest.mark.parametrize(("kind", "products"), list(product(("", *AUTO_KINDS), MATMUL_LIBRARIES)))
def test_what_is_written_is_read(kind, products):
    every = [Numerics(kind, products, flash) for flash in CHOICES]
    assert [parse_numerics(str(one)) for one in every] == every
    assert len({str(one) for one in every}) == len(every)


def test_the_reference_has_a_word():
    assert str(REFERENCE) == "reference"
    assert parse_numerics("reference") == parse_numerics("flash=none  products=onednn") == REFERENCE
    assert parse_numerics("products=default flash=bf16-long,fp32-short").flash == ("fp32-short", "bf16-long")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("references", "'references' must be one of kind=, products= and flash=, each at most once"),
        ("product=default flash=none", "'product=default' must be one of"),
        ("products=default products=onednn flash=none", "'products=onednn' must be one of"),
        ("products=mkl flash=none", "products=mkl is unknown, use one of onednn, default, mixed"),
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
