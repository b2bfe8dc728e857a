"""Duplicates among the rows of a run's sources, and their overlaps with other files.

row_texts (rows as texts) -> exact_duplicates, near_duplicates, overlaps -> check_sources (all of them) -> check_report
"""

from __future__ import annotations

from kumi.data.hygiene.check_report import check_lines
from kumi.data.hygiene.check_sources import check_sources

__all__ = ["check_lines", "check_sources"]
