"""llama.cpp's name of the rule by which a byte-level BPE tokenizer splits text before it merges bytes.

llama.cpp's converter recognises tokenizers by a hash over the token ids of one text, so it refuses every vocabulary
that its authors have not listed, although its engine needs the splitting rule alone. The rules and their names are from
`src/llama-vocab.cpp` of llama.cpp.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kumi.files.untrusted import TOKENIZER, read_object

# Stands for the regular expression that ByteLevel of tokenizers has built in, which is GPT-2's.
_GPT2 = "ByteLevel"
# Regular expressions of llama.cpp's rules, and parts of them: a digit; punctuation, line ends and spaces (_END and
# _SLASHES); contractions and words (_LETTERS); words by the case of their letters (_CASES), which may end in a
# contraction (_CONTRACTIONS).
_DIGITS = r"\p{N}"
_END = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_CASES = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
)
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_SLASHES = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"

# The rules in order, and whether a word that is a token is taken without merging -> llama.cpp's name.
_NAMES = {
    ((_GPT2,), False): "gpt-2",
    ((_DIGITS, _GPT2), False): "starcoder",
    ((_LETTERS + r"\p{N}{1,3}" + _END,), True): "llama-bpe",
    ((_LETTERS + r"\p{N}{1,3}" + _END,), False): "smaug-bpe",
    ((_LETTERS + r"\p{N}" + _END,), False): "qwen2",
    ((f"{_CASES[0]}{_CONTRACTIONS}|{_CASES[1]}{_CONTRACTIONS}|" + r"\p{N}{1,3}" + _SLASHES,), False): "gpt-4o",
    ((f"{_CASES[0]}|{_CASES[1]}|" + r"\p{N}" + _SLASHES,), True): "tekken",
}


def pre_tokenizer_name(folder: Path) -> str | None:
    """Return the name of the splitting rule of tokenizer.json in `folder`; None if llama.cpp has no such rule.

    Also None for tokenizers that are not byte-level BPE; llama.cpp's converter reads those from tokenizer.model.
    """
    if not (folder / "tokenizer.json").is_file():
        return None
    tokenizer = read_object(folder, "tokenizer.json", bounds=TOKENIZER, infinity=True)
    model: Any = tokenizer.get("model")
    if not isinstance(model, dict) or model.get("type", "BPE") != "BPE" or model.get("byte_fallback"):
        return None
    rules = _rules(tokenizer.get("pre_tokenizer"))
    return None if rules is None else _NAMES.get((rules, model.get("ignore_merges") is True))


def _rules(splitter: Any) -> tuple[str, ...] | None:
    """Return the regular expressions of the pre-tokenizer `splitter` in order; None if it has another kind of rule."""
    if not isinstance(splitter, dict):
        return None
    kind = splitter.get("type")
    if kind == "Sequence":
        parts = [_rules(part) for part in splitter.get("pretokenizers") or ()]
        return None if None in parts else tuple(rule for part in parts for rule in part or ())
    if kind == "ByteLevel":
        if splitter.get("add_prefix_space") is not False:
            return None
        return (_GPT2,) if splitter.get("use_regex", True) else ()
    if kind == "Digits" and splitter.get("individual_digits") is True:
        return (_DIGITS,)
    pattern = splitter.get("pattern")
    if kind == "Split" and isinstance(pattern, dict) and isinstance(pattern.get("Regex"), str):
        # Both settings make each match a word, and also each text between two matches.
        whole = (splitter.get("behavior"), splitter.get("invert")) in (("Isolated", False), ("Removed", True))
        return (pattern["Regex"],) if whole else None
    return None
