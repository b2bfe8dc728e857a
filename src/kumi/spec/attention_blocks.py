"""The blocks in which a CPU computes attention: numbers of queries and of keys.

oneDNN compiles a kernel for each shape of a product and keeps it, so a block's keys come in few sizes: multiples of 64
up to 1,024, and from there eight sizes per power of two.
"""

from __future__ import annotations

from functools import lru_cache

# Queries per block: fewer waste less on masked pairs, more make larger matrix products.
QUERY_BLOCK = 128
# In ring attention, a block whose last queries attend to nothing is shortened to a multiple of this many queries.
QUERY_ALIGNMENT = 32
_KEY_ALIGNMENT, _LARGEST_ALIGNED, _SIZES_PER_POWER = 64, 1024, 8


def key_size(count: int) -> int:
    """Return the smallest size of a block's keys that is at least `count`.

    Above 1,024 keys, it is at most an eighth larger than `count`.
    """
    if count <= _LARGEST_ALIGNED:
        return -(-count // _KEY_ALIGNMENT) * _KEY_ALIGNMENT
    unit = (1 << (count - 1).bit_length()) // (2 * _SIZES_PER_POWER)
    return -(-count // unit) * unit


@lru_cache(maxsize=256)
def num_key_sizes(longest: int) -> int:
    """Return how many different sizes `key_size` returns for up to `longest` keys."""
    sizes = {key_size(count) for count in range(_KEY_ALIGNMENT, longest + _KEY_ALIGNMENT, _KEY_ALIGNMENT)}
    return len(sizes)
