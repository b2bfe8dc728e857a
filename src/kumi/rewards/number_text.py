r"""Numbers in texts, as exact fractions, and the comparison of LaTeX answers.

A number is written as one of
- digits with a decimal point, and commas, `{,}`, `\,` or thin spaces between groups of three: 1,234.5
- a fraction a/b, \frac{a}{b}, \dfrac, \tfrac, \frac12, or one after an integer: 1 1/2, 2\frac{1}{3}
- digits times a power of ten: 1.5e3, 1.5 \times 10^{3}
It may have a sign and a currency sign before it, and % or a unit behind it. A comma that does not separate groups of
three digits is no part of a number: "1,5" is two numbers.

A percentage is a hundredth of its number. Where only one of two numbers has a percent sign, the sign may also be
ignored: 50% equals 0.5 and 50. Units are not converted: they are ignored where only one number has a unit, and must be
equal where both have one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

# The most characters of a number, and the largest exponent of its power of ten. Beyond them a text is no number: its
# exact fraction could take any amount of memory.
_LONGEST, _LARGEST_EXPONENT = 300, 300

_INTEGER = r"\d{1,3}(?:(?:,|\{,\}|\\,|[\u2009\u202f\u00a0])\d{3})+(?!\d)|\d+"
_DECIMAL = rf"(?:(?:{_INTEGER})(?:\.\d+)?|\.\d+)"
_BRACED = rf"\{{\s*(?:[-+])?\s*{_DECIMAL}\s*\}}"
_LATEX_FRACTION = rf"\\[dt]?frac\s*(?:{_BRACED}\s*{_BRACED}|\d\s*\d|\d\s*{_BRACED}|{_BRACED}\s*\d)"
_POWER = r"(?:[eE][-+]?\d+|\s*(?:\\times|\\cdot|\u00d7|\*)\s*10\s*(?:\^|\*\*)\s*(?:\{\s*[-+]?\d+\s*\}|[-+]?\d+))"
_NUMBER = re.compile(
    # Digits behind a letter, as in H2, and exponents and indices are no numbers of their own. A hyphen behind a letter
    # or a digit is no sign: "7-3", "x-2".
    r"(?<![A-Za-z0-9_^])(?<![_^]\{)(?<![_^]-)(?<![_^]\{-)"
    r"(?P<sign>(?<![)}\]])[-+\u2212\u2013])?(?P<currency>\\?[$\u20ac\u00a3\u00a5]\s*)?"
    rf"(?:(?P<whole>\d+)\s*(?P<mixed>{_LATEX_FRACTION})"
    rf"|(?P<latex>{_LATEX_FRACTION})"
    r"|(?P<whole2>\d+)\s+(?P<mixed2>\d+\s*/\s*\d+)(?![\d/])"
    rf"|(?P<top>{_DECIMAL})\s*/\s*(?P<bottom>{_DECIMAL})"
    rf"|(?P<decimal>{_DECIMAL})(?P<power>{_POWER})?)"
    r"(?P<percent>\s*\\?%)?"
)
# The numerator or the denominator of a fraction.
_PART = re.compile(rf"[-+]?\s*(?:{_DECIMAL})")
# What stands between groups of three digits.
_GROUPING = re.compile(r",|\{,\}|\\,|[\u2009\u202f\u00a0\s]")


class WrittenNumber(NamedTuple):
    """A number in a text. `percent`: True if it has a percent sign; `value` is then a hundredth of the written number.

    `unit`: its unit, or "".
    """

    value: Fraction
    percent: bool = False
    unit: str = ""


def last_number(text: str) -> WrittenNumber | None:
    """Return the last number in `text`, without a unit; None if there is no number."""
    last = None
    for match in _NUMBER.finditer(text):
        last = _value(match) or last
    return last


# A unit: letters with an exponent, as in cm, km/h, m^2, apples. A single letter is a unit only if it is one of
# `_LETTERS` behind a space: elsewhere it is a variable. The names of `_CONSTANTS` are numbers, and no units.
_UNIT = re.compile(r"\s*(?:°\s*[CF]?|(?:[^\W\d_]|[/µ ])*[^\W\d_](?:\^\{?-?\d\}?)?)")
_LETTERS = frozenset("mgshlLNJWVAKCF")
_CONSTANTS = frozenset({"pi", "tau", "e", "i", "inf", "infty", "infinity"})


def whole_number(text: str) -> WrittenNumber | None:
    """Return the number that `text` consists of, with its unit; None if it is anything else."""
    # Here a sign with a space behind it is the number's. Within a longer text, it is an operator or the mark of a list.
    text = re.sub(r"^([-+\u2212])\s+", r"\1", _without_markup(text))
    match = _NUMBER.match(text)
    number = None if match is None else _value(match)
    if match is None or number is None:
        return None
    rest = text[match.end() :]
    unit = " ".join(rest.split())
    if not rest or _is_unit(rest, unit):
        return number._replace(unit=unit.lower() if len(unit) > 1 else unit)
    return None


def _is_unit(rest: str, unit: str) -> bool:
    """Return True if `rest`, the text behind a number, is a unit; `unit` is `rest` with single spaces."""
    name = unit.partition("^")[0]
    if not _UNIT.fullmatch(rest) or name.lower() in _CONSTANTS:
        return False
    return len(name) > 1 or name == "°" or (rest[:1] == " " and name in _LETTERS)


def equal_numbers(left: WrittenNumber, right: WrittenNumber, tolerance: float = 0.0) -> bool:
    """Return True if two numbers are equal, up to the relative difference `tolerance`.

    The module's docstring has the rules for units and percent signs.
    """
    if left.unit and right.unit and left.unit != right.unit:
        return False
    if left.percent == right.percent:
        return _close(left.value, right.value, tolerance)
    percentage, plain = (left.value, right.value) if left.percent else (right.value, left.value)
    return _close(percentage, plain, tolerance) or _close(100 * percentage, plain, tolerance)


def _close(left: Fraction, right: Fraction, tolerance: float) -> bool:
    return abs(left - right) <= Fraction(tolerance) * max(abs(left), abs(right))


def _value(match: re.Match[str]) -> WrittenNumber | None:
    """Return the number of a match of `_NUMBER`; None if a denominator is 0 or the number is too large."""
    if len(match[0]) > _LONGEST:
        return None
    parts = match.groupdict()
    whole, mixed = parts["whole"] or parts["whole2"], parts["mixed"] or parts["mixed2"]
    try:
        if mixed:
            value = Fraction(whole) + _fraction(mixed)
        elif parts["latex"]:
            value = _fraction(parts["latex"])
        elif parts["top"]:
            value = _decimal(parts["top"]) / _decimal(parts["bottom"])
        else:
            value = _decimal(parts["decimal"]) * Fraction(10) ** _exponent(parts["power"])
    except (ZeroDivisionError, OverflowError):
        return None
    negative = (parts["sign"] or "").strip() in ("-", "\u2212", "\u2013")
    percent = parts["percent"] is not None
    return WrittenNumber((-value if negative else value) / (100 if percent else 1), percent)


def _fraction(text: str) -> Fraction:
    r"""Return the value of a/b or \frac{a}{b}, where \frac12 is a half."""
    body = re.sub(r"\\[dt]?frac", "", text)
    parts = re.findall(r"\d", body) if re.fullmatch(r"\s*\d\s*\d\s*", body) else _PART.findall(body)
    top, bottom = (_decimal(part) for part in parts)
    return top / bottom


def _decimal(text: str) -> Fraction:
    return Fraction(_GROUPING.sub("", text))


def _exponent(power: str | None) -> int:
    """Return the exponent of e3 or \\times 10^{3}; raise OverflowError for one beyond `_LARGEST_EXPONENT`."""
    exponent = 0 if power is None else int(re.findall(r"[-+]?\d+", power)[-1])
    if abs(exponent) > _LARGEST_EXPONENT:
        raise OverflowError
    return exponent


# Spaces of LaTeX.
_SPACES = re.compile(r"\\[!,;: ]|~|\\quad|\\qquad")
# Commands that change how an answer looks and not its value.
_SIZES = re.compile(r"\\(?:left|right|displaystyle|big|Big|bigg|Bigg)(?![a-zA-Z])")
# Commands for text; their content is part of the answer.
_WORDS = re.compile(r"\\(?:text|mathrm|textbf|mathbf|textit|mathit|mbox|operatorname)\s*\{([^{}]*)\}")
# The left side of an equation, such as "x =".
_ASSIGNED = re.compile(r"^\s*[a-zA-Z](?:_\w|_\{\w+\})?\s*=(?!=)")


def _without_markup(text: str) -> str:
    """Return a LaTeX answer without its delimiters, its commands of layout, and a leading `x =`."""
    text = text.strip().rstrip(".").strip()
    for opening, closing in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
        if text.startswith(opening) and text.endswith(closing) and len(text) >= len(opening) + len(closing):
            text = text[len(opening) : -len(closing)]
    # Separators between groups of digits become commas: {,} and the spaces \, and \!, also behind a comma.
    text = text.replace("{,}", ",")
    text = re.sub(r"(?<=\d)\\[,!](?=\d{3})", ",", text).replace(",,", ",")
    text = _SPACES.sub(" ", text)
    text = _SIZES.sub("", text)
    text = re.sub(r"\s+\^", "^", _WORDS.sub(r" \1 ", text))
    text = re.sub(r"\^\s*\{?\s*\\circ\s*\}?|\\degree(?![a-zA-Z])", "°", text)
    return _ASSIGNED.sub("", text).strip()


def normal_latex(text: str) -> str:
    r"""Return a LaTeX answer in a normal form, for comparison as a text: without white space, layout and \dfrac."""
    text = re.sub(r"\\[dt]frac", r"\\frac", _without_markup(text))
    text = re.sub(r"\\frac\s*(\w)\s*(\w)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\sqrt\s*(\w)", r"\\sqrt{\1}", text)
    text = re.sub(r"([_^])\s*\{\s*(\w)\s*\}", r"\1\2", text)
    return re.sub(r"\s+", "", text)


def equal_answers(reply: str, answer: str, tolerance: float = 0.0) -> bool:
    """Return True if two LaTeX answers are equal: as numbers, or else as texts in their normal form.

    The elements of a list such as "1, 2" or "(1, 2)" are compared one by one, in their order.
    """
    left, right = whole_number(reply), whole_number(answer)
    if left is not None and right is not None:
        return equal_numbers(left, right, tolerance)
    if normal_latex(reply) == normal_latex(answer):
        return True
    parts, others = _elements(reply), _elements(answer)
    if len(parts) != len(others) or len(parts) < 2:
        return False
    return all(equal_answers(part, other, tolerance) for part, other in zip(parts, others, strict=True))


def _elements(text: str) -> Sequence[str]:
    """Return the elements of a list; brackets around it are the first and the last. Return `text` if it is no list."""
    text = _without_markup(text)
    if text[:1] in ("(", "[") and text[-1:] in (")", "]"):
        inner = text[1:-1]
        # The brackets are elements, so that an interval such as (1, 2] differs from a tuple.
        return [f"\\{text[0]}", *inner.split(","), f"\\{text[-1]}"] if "," in inner else [text]
    return text.split(",")


# Escaped braces, the beginnings of boxes, and braces. Escaped braces match first, so that they do not count as braces.
_BRACES = re.compile(r"\\[{}]|\\(?:boxed|fbox)\s*\{|[{}]")


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last complete `\boxed{...}` or `\fbox{...}`, or `\boxed x`; None if there is none."""
    opened: list[int | None] = []
    last = None
    for match in _BRACES.finditer(text):
        if match[0] == "{":
            opened.append(None)
        elif match[0] == "}":
            start = opened.pop() if opened else None
            if start is not None and (last is None or start > last[0]):
                last = (start, match.start())
        elif len(match[0]) > 2:  # a box, not an escaped brace
            opened.append(match.end())
    if last is not None:
        return text[slice(*last)]
    bare = re.findall(r"\\boxed\s+([^\s${}]+)", text)
    return bare[-1] if bare else None
