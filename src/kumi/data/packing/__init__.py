"""Pack units of examples into rows: which units each row has, and the columns of the rows.

lengths of the units -> bins (best fit, no unit split) -> a file in the store's folder -> rows of a batch
"""

from __future__ import annotations

from kumi.data.packing.best_fit import Bins, pack
from kumi.data.packing.bins_file import open_bins, pack_units
from kumi.data.packing.packed_rows import PackedRows
from kumi.data.packing.unit_positions import mean_sequence_span, positions_of

__all__ = ["Bins", "PackedRows", "mean_sequence_span", "open_bins", "pack", "pack_units", "positions_of"]
