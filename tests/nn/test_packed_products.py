"""Packed weights give the same products, for few rows and many, and leave the decoder as it was."""

import torch
import torch.nn.functional as F

from kumi.nn.decoder import Decoder
from kumi.nn.linear import linears
from kumi.nn.packed_products import packed_products
from steps import SPECS


def test_products_are_those_of_the_weights():
    torch.manual_seed(0)
    decoder = Decoder(SPECS["llama"], dtype=torch.float32)
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter)
    layer = linears(decoder)[0]
    with torch.no_grad():
        for rows in (1, 8, 300):
            x = torch.randn(rows, 1, layer.weight.shape[1])
            plain, head = layer(x), torch.randn(rows, decoder.head_weight.shape[1])
            logits = decoder.head_product(head, decoder.head_weight)
            with packed_products(decoder, 8):
                assert layer.multiply is not F.linear
                torch.testing.assert_close(layer(x), plain, rtol=1e-5, atol=1e-5)
                torch.testing.assert_close(
                    decoder.head_product(head, decoder.head_weight), logits, rtol=1e-5, atol=1e-5
                )
    assert all(each.multiply is F.linear for each in linears(decoder))
    assert decoder.head_product is F.linear


def test_other_dtypes_are_not_packed():
    decoder = Decoder(SPECS["llama"], dtype=torch.float64)
    with packed_products(decoder, 8):
        assert all(each.multiply is F.linear for each in linears(decoder))
