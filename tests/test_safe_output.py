"""Text of anyone leaves a terminal and a page as they were."""

from __future__ import annotations

import re
import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from kumi.safe_output import fenced, visible, without_secrets

# ESC sequences, C1 controls, bidi overrides and isolates, and titles: none may reach a terminal.
ATTACKS = [
    "\x1b[2J\x1b[31mred",
    "\x1b]0;title\x07",
    "\x1b]8;;http://evil\x1b\\link\x1b]8;;\x1b\\",
    "\x9b31m\x9d0;title\x9c\x90q\x9c",
    "\x1bP+q544e\x1b\\",
    "a\rb\x08\x7f\x00\x0e\x0f\x05",
    "abc\u202egnp.exe\u202c\u2066\u2069\u061c\u200e\u200f",
    "in\u200bvis\u2060ible\ufeff\u00ad\U000e0041",
    "line\u2028paragraph\u2029\x85\x0b\x0c",
    "\ud800",
]


def _bad(text):
    return [char for char in text if unicodedata.category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp")]


def test_no_attack_is_left():
    for attack in ATTACKS:
        shown = visible(attack)
        assert set(_bad(shown)) <= {"\n", "\t"}, ascii(shown)
        assert not re.search(
            rb"[\x00-\x08\x0b-\x1f\x7f]|\xc2[\x80-\x9f]|\xe2\x80[\xa8-\xae\x8b\x8e\x8f]", shown.encode()
        )
    assert visible("\x1b[0m \x9b \u202e") == "\\x1b[0m \\x9b \\u202e"


def test_text_stays():
    texts = [
        "a\n\tb",
        "naïve — “quotes”",
        "日本語\u3000全角",
        "\u0645\u06cc\u200c\u062e",
        "👩\u200d👩\u200d👧 🫨",
        "e\u0301",
        "\xa0",
    ]
    assert [visible(text) for text in texts] == texts


@given(st.text(st.characters(codec=None)))
def test_every_text_becomes_visible(text):
    shown = visible(text)
    assert set(_bad(shown)) <= set("\n\t\u200c\u200d")
    assert visible(shown) == shown
    shown.encode()


@given(st.text(st.sampled_from("`~\n a<&*\x1b")))
def test_a_fence_ends_after_the_text(text):
    block = fenced(text)
    first, *lines, last = block.split("\n")
    assert first == f"{last}text"
    assert set(last) == {"`"}
    assert "\n".join(lines) == visible(text)
    # CommonMark: a fence closes at a line of at least as many backticks, after at most three spaces.
    assert not any(re.fullmatch(rf" {{0,3}}`{{{len(last)},}}\s*", line) for line in lines)


def test_secrets_and_passwords_are_taken_out_of_the_texts_of_others(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "c4n4ry-1")
    monkeypatch.setenv("HF_TOKEN", "c4n4ry-1-and-more")
    monkeypatch.setenv("SOME_AUTH", "basic")  # too short to be a secret
    text = "401 for c4n4ry-1-and-more and c4n4ry-1 at https://me:pass@word@host:80/x (basic) https://host:80/a:b@c"
    hidden = "401 for (not shown) and (not shown) at https://me:(not shown)@host:80/x (basic) https://host:80/a:b@c"
    assert without_secrets(text) == hidden
