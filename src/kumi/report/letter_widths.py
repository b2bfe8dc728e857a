"""Widths of the letters of DejaVu Sans, from its font file: the widest of the fonts that pictures name."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

# Thousandths of the font size, for the printable ASCII characters from the blank on.
_REGULAR = """
318 401 460 838 636 950 780 275 390 390 500 838 318 361 318 337 636 636 636
636 636 636 636 636 636 636 337 337 838 838 838 531 1000 684 686 698 770 632
575 775 752 295 295 656 557 863 748 787 603 787 695 635 611 732 684 989 685
611 685 390 337 390 838 500 500 613 635 550 635 615 352 635 634 278 278 579
278 974 634 612 635 635 411 521 392 634 592 818 592 592 525 636 337 636 838
"""
_BOLD = """
348 456 521 838 696 1002 872 306 457 457 523 838 380 415 380 365 696 696 696
696 696 696 696 696 696 696 400 400 838 838 838 580 1000 774 762 734 830 683
683 821 837 372 372 775 637 995 837 850 733 850 770 720 682 812 774 1103 771
724 725 457 365 457 838 500 500 675 716 593 716 678 435 716 712 343 343 665
343 1042 712 687 716 716 493 595 478 712 652 924 645 652 582 712 365 712 838
"""
# Any other character: wider than nearly all letters.
_OTHER = 800


@cache
def _widths(text: str) -> tuple[int, ...]:
    return tuple(int(width) for width in text.split())


def text_width(content: str, size: float, *, bold: bool = False) -> float:
    """Return the width of a line of text with the font size `size`, in the same unit."""
    table = _widths(_BOLD if bold else _REGULAR)
    codes = (ord(letter) - 32 for letter in content)
    return size * sum(table[code] if 0 <= code < len(table) else _OTHER for code in codes) / 1000


def wrap_text(content: str, width: float, size: float) -> Iterator[str]:
    """Yield the lines of `content`, broken at blanks so that each is at most `width` wide, but for wider words."""
    line = ""
    for word in content.split():
        longer = f"{line} {word}" if line else word
        if line and text_width(longer, size) > width:
            yield line
            longer = word
        line = longer
    yield line
