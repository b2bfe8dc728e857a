"""SVG elements as text, enough for bars, axes and points, without a plotting library.

Text and lines have `currentColor`: dark on white, light on dark in dark mode, or the colour of the page. Every picture
has a title and a description for screen readers. Lengths are in units of the view box.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import floor, log10

from kumi.report.letter_widths import text_width

WIDTH = 720.0
# The right margin; the left margin is as wide.
RIGHT = WIDTH - 12
# Font size.
SIZE = 13.0
# The colours of the background, and of text and lines.
PAPER, INK = "#ffffff", "#1a1a1a"
# The same in dark mode. The rules of a page that contains the picture are more specific and take precedence.
DARK_PAPER, DARK_INK = "#17181a", "#e8e8e6"
_DARK_MODE = (
    f"<style>@media screen and (prefers-color-scheme:dark){{svg{{color:{DARK_INK}}}.paper{{fill:{DARK_PAPER}}}"
    f".edge{{stroke:{DARK_PAPER}}}}}</style>"
)
_HATCH = (
    '<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<line x1="0" y1="0" x2="0" y2="6" stroke="#fff" stroke-width="3" stroke-opacity="0.6"/></pattern></defs>'
)


def number(value: float) -> str:
    """Format a length with at most two decimals."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def rect(
    x: float,
    y: float,
    width: float,
    height: float,
    fill: str,
    *,
    hatched: bool = False,
    hint: str = "",
    apart: bool = False,
) -> str:
    """Draw a filled rectangle.

    `hatched` adds white lines, `hint` a tooltip, and `apart` an edge in the background colour.
    """
    place = f'x="{number(x)}" y="{number(y)}" width="{number(max(0.0, width))}" height="{number(height)}"'
    edge = f' class="edge" stroke="{PAPER}" stroke-width="0.8"' if apart and width > 2.5 else ""
    tooltip = f"<title>{escape(hint)}</title>" if hint else ""
    drawn = f'<rect {place} fill="{fill}"{edge}>{tooltip}</rect>'
    return drawn + (f'<rect {place} fill="url(#hatch)" pointer-events="none"/>' if hatched else "")


def text(
    x: float,
    y: float,
    content: str,
    *,
    anchor: str = "start",
    size: float = SIZE,
    fill: str = "currentColor",
    bold: bool = False,
) -> str:
    """Draw a line of text with its baseline at `y`; `anchor` is start, middle or end."""
    look = f'font-size="{number(size)}" text-anchor="{anchor}" fill="{fill}"' + ' font-weight="600"' * bold
    return f'<text x="{number(x)}" y="{number(y)}" {look}>{escape(content)}</text>'


def line(
    x1: float, y1: float, x2: float, y2: float, *, width: float = 1.0, dash: str = "", opacity: float = 1.0
) -> str:
    """Draw a straight line in the text colour."""
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return (
        f'<line x1="{number(x1)}" y1="{number(y1)}" x2="{number(x2)}" y2="{number(y2)}" stroke="currentColor" '
        f'stroke-width="{number(width)}" stroke-opacity="{number(opacity)}"{dashed}/>'
    )


def shape(
    points: list[tuple[float, float]], *, fill: str, hollow: bool = False, closed: bool = True, hint: str = ""
) -> str:
    """Draw a polygon, or a polyline if not `closed`; a hollow one has only an outline in `fill`."""
    coordinates = " ".join(f"{number(x)},{number(y)}" for x, y in points)
    paint = f'fill="none" stroke="{fill}" stroke-width="2"' if hollow or not closed else f'fill="{fill}"'
    tooltip = f"<title>{escape(hint)}</title>" if hint else ""
    tag = "polygon" if closed else "polyline"
    return f'<{tag} points="{coordinates}" {paint}>{tooltip}</{tag}>'


def legend(entries: Sequence[tuple[str, str, bool]]) -> tuple[list[str], float]:
    """Draw entries of (name, fill, hatched) in as many lines as they need; return the marks and the lower edge.

    An entry with an empty fill is text without a swatch.
    """
    marks: list[str] = []
    x, y = WIDTH - RIGHT, 10.0
    for name, fill, hatched in entries:
        swatch = 18.0 if fill else 0.0
        width = swatch + width_of(name) + 14
        if x + width > RIGHT and x > WIDTH - RIGHT:
            x, y = WIDTH - RIGHT, y + 20
        if fill:
            marks.append(rect(x, y, 12, 12, fill, hatched=hatched))
        marks.append(text(x + swatch, y + 11, name))
        x += width
    return marks, y + 16


def width_of(content: str, size: float = SIZE, *, bold: bool = False) -> float:
    """Return the width of a text in the widest of the fonts that pictures name."""
    return text_width(content, size, bold=bold)


def contrasting(fill: str) -> str:
    """Return black or white, the one with more contrast on `fill` (relative luminance, WCAG 2)."""
    parts = [int(fill[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return "#000000" if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.179 else "#ffffff"


def ticks(most: float, count: int = 6) -> list[float]:
    """Return about `count` round values from 0 to `most`."""
    if most <= 0:
        return [0.0]
    raw = most / count
    power = 10.0 ** floor(log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * 0.999)
    return [step * index for index in range(int(most / step * 1.0001) + 1)]


def picture(name: str, title: str, description: str, height: float, marks: list[str]) -> str:
    """Return an SVG document of the marks, `WIDTH` wide. `name` prefixes ids, which must be unique in a page."""
    body = "".join([_HATCH, *marks]).replace('id="hatch"', f'id="{name}-hatch"').replace("#hatch", f"#{name}-hatch")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {number(WIDTH)} {number(height)}" role="img" '
        f'aria-labelledby="{name}-title {name}-desc" color="{INK}" '
        f'font-family="system-ui, -apple-system, Segoe UI, DejaVu Sans, Arial, sans-serif">'
        f'<title id="{name}-title">{escape(title)}</title><desc id="{name}-desc">{escape(description)}</desc>'
        f"{_DARK_MODE}"
        f'<rect class="paper" width="100%" height="100%" fill="{PAPER}"/>{body}</svg>'
    )
