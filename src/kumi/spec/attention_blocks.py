"""The blocks in which a CPU computes attention: numbers of queries and of keys.

oneDNN compiles a kernel for each shape of a product and keeps it, so a block's keys come in few sizes: multiples of 64
up to 1,024, and from there eight sizes per power of two.
"""

from __future__ import annotations

from functools import lru_cache

# Queries per block: fewer waste less on masked pairs, more make larger matrix products.
QUERY_BLOCK = 128
# Queries of a block whose documents end early, in ring attention, are a multiple of this.
QUERY_ALIGNMENT = 32
_KEY_ALIGNMENT, _LARGEST_ALIGNED, _SIZES_PER_POWER = 64, 1024, 8


def key_size(count: int) -> int:
    """Return the smallest size of a block's keys that is at least `count`: at most an eighth more above 1,024 keys."""
    if count <= _LARGEST_ALIGNED:
        return -(-count // _KEY_ALIGNMENT) * _KEY_ALIGNMENT
    unit = (1 << (count - 1).bit_length()) // (2 * _SIZES_PER_POWER)
    return -(-count // unit) * unit


@lru_cache(maxsize=256)
def num_key_sizes(longest: int) -> int:
    """Return the number of sizes that blocks of up to `longest` keys have."""
    sizes = {key_size(count) for count in range(_KEY_ALIGNMENT, longest + _KEY_ALIGNMENT, _KEY_ALIGNMENT)}
    return len(sizes)
