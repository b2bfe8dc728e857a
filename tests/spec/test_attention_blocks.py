"""The sizes of attention blocks: few, and little larger than what they hold."""

from __future__ import annotations

import pytest

from kumi.spec.attention_blocks import key_size, num_key_sizes


@pytest.mark.parametrize("count", [1, 63, 64, 65, 1000, 1024, 1025, 1152, 1153, 5000, 8192, 32767])
def test_a_size_holds_its_keys_with_little_to_spare(count):
    size = key_size(count)
    assert size >= count
    assert size < count + max(64, count / 8)


def test_sizes_are_few():
    assert [key_size(count) for count in (64, 65, 1025, 1153, 2049)] == [64, 128, 1152, 1280, 2304]
    assert num_key_sizes(512) == 8
    assert num_key_sizes(1024) == 16
    assert num_key_sizes(8192) == 40
    assert num_key_sizes(32768) == 56
