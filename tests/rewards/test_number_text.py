"""Numbers in texts, and the comparison of LaTeX answers."""

from fractions import Fraction

import pytest

from kumi.rewards.number_text import equal_answers, equal_numbers, last_boxed, last_number, whole_number


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("72", 72),
        ("1,234.5", Fraction(2469, 2)),
        (r"1{,}234", 1234),
        (r"1\,234", 1234),
        ("1\u202f234", 1234),
        (".5", Fraction(1, 2)),
        ("\u22123", -3),
        ("- 3", -3),
        ("-1/2", Fraction(-1, 2)),
        (r"-\dfrac{1}{2}", Fraction(-1, 2)),
        (r"\frac34", Fraction(3, 4)),
        (r"\frac{1,000}{3}", Fraction(1000, 3)),
        ("1 1/2", Fraction(3, 2)),
        (r"2\frac{1}{3}", Fraction(7, 3)),
        ("1.5e3", 1500),
        (r"1.5 \times 10^{-3}", Fraction(3, 2000)),
        (r"\$1,000,000", 1_000_000),
        ("€ 5", 5),
        ("12 cm", 12),
        (r"12 \text{ cm}^2", 12),
        (r"90^\circ", 90),
        (r"$x = \frac{1}{2}$.", Fraction(1, 2)),
        (r"\[ 7 \]", 7),
        ("50%", Fraction(1, 2)),
    ],
)
def test_a_text_is_a_number(text, value):
    assert whole_number(text).value == value


@pytest.mark.parametrize(
    "text", ["", "x", "2x", "2 pi", "5^2", "1,5", "1,2345", "7-3", "(1,2)", r"\sqrt{2}", "3/0", "1e999999", "1" * 400]
)
def test_a_text_is_no_number(text):
    assert whole_number(text) is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("She has 3 cats and 1,200 dogs. That makes 1,203.", 1203),
        ("12 * 6 = 72\n#### 72", 72),
        ("the area is 5 m^2.", 5),
        ("H2O at 20 degrees", 20),
        ("x_{12} = 4", 4),
        ("between 5-3", 3),
        ("答案是42", 42),
        ("- 8 apples", 8),
        ("it is 3/0 of 7/2", Fraction(7, 2)),
        ("no number, GPT4 said", None),
    ],
)
def test_the_last_number_of_a_text(text, value):
    number = last_number(text)
    assert (number and number.value) == value


@pytest.mark.parametrize(
    ("left", "right", "equal"),
    [
        ("1,234", "1234.0", True),
        ("0.5", r"\frac{1}{2}", True),
        ("0.333", "1/3", False),
        # A percent sign may be left out, as a hundredth or not at all.
        ("50%", "0.5", True),
        ("50%", "50", True),
        ("50%", "5", False),
        ("50%", r"50\%", True),
        # Units may be left out, but are not converted.
        ("5 m", "5", True),
        ("5 m", "5 cm", False),
        ("12 apples", "12 Apples", True),
    ],
)
def test_numbers_are_equal(left, right, equal):
    assert equal_numbers(whole_number(left), whole_number(right)) is equal
    assert equal_numbers(whole_number(right), whole_number(left)) is equal


def test_a_tolerance_is_relative():
    left, right = whole_number("1000"), whole_number("1001")
    assert not equal_numbers(left, right, 0.0009)
    assert equal_numbers(left, right, 0.001)


@pytest.mark.parametrize(
    ("reply", "answer", "equal"),
    [
        (r"(1, \frac12)", "(1,0.5)", True),
        ("[1,2)", "(1,2)", False),
        ("(1,2)", "(2,1)", False),
        ("1, 2, 3", "1,2,3", True),
        (r"\sqrt2", r"\sqrt{2}", True),
        (r"\left( x^{2} + 1 \right)", "(x^2+1)", True),
        (r"\text{Yes}", "Yes", True),
        ("2x", "2", False),
        (r"5^2", "5", False),
        ("x", "y", False),
    ],
)
def test_answers_are_equal(reply, answer, equal):
    assert equal_answers(reply, answer) is equal


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"a \boxed{1} b \boxed{\frac{1}{2}} c", r"\frac{1}{2}"),
        (r"\boxed{\{1\}}", r"\{1\}"),
        (r"\boxed{\boxed{3}}", "3"),
        (r"so \boxed{4} and \boxed{5", "4"),
        (r"{ so \boxed {4}", "4"),
        (r"$\boxed 7$", "7"),
        (r"\fbox{8}", "8"),
        ("no box", None),
        (r"\boxed{", None),
    ],
)
def test_the_last_box_that_closes(text, content):
    assert last_boxed(text) == content
