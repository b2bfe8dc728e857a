"""The four-bit matrices of a loaded decoder, beside those of a run."""

from importlib.util import find_spec

import pytest
import torch

from kumi.nn import Decoder
from kumi.nn.nf4 import pack_blocks, packed_matrices, quantize_linears
from kumi.spec import families
from small_llama import SMALL_LLAMA


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
def test_a_float32_decoder_gets_the_codes_of_a_run_in_bfloat16():
    decoder = Decoder(families.from_hf(SMALL_LLAMA))
    with torch.no_grad():
        for number, parameter in enumerate(decoder.parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)))
    weights = {name: parameter.detach().clone() for name, parameter in decoder.named_parameters()}
    quantize_linears(decoder, torch.bfloat16)
    packed = packed_matrices(decoder)
    assert packed
    changed = 0
    for name, matrix in packed.items():
        values = weights[f"{name}.weight"].flatten()
        for stored, expected in zip((matrix.codes, matrix.scales), pack_blocks(values.bfloat16()), strict=True):
            assert stored.equal(expected)
        changed += int((pack_blocks(values)[0] != matrix.codes).sum())
        assert matrix.matrix().dtype == torch.bfloat16
    assert changed, "no code depends on the rounding to bfloat16, so this test would pass without it"
