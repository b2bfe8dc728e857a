"""A Modelfile for Ollama beside a GGUF file: the settings that the GGUF file does not contain.

Ollama renders chats by the template in the GGUF file, so another one in the Modelfile could only contradict it. The
grammar is that of `parser/parser.go`, the parameters are those of `docs/modelfile.mdx` of Ollama 0.33.0-rc2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kumi.convert.hf.write_folder import read_generation
from kumi.errors import ModelError, RefusedError
from kumi.files.untrusted import TOKENIZER, brief, read_object
from kumi.spec import families

SUFFIX = ".Modelfile"
# Ollama's default context on devices with the least memory (`envconfig/config.go`).
_SMALLEST_DEFAULT_CONTEXT = 4096
# Key of generation_config.json -> parameter of Ollama, and the type of its value.
_PARAMETERS: dict[str, tuple[str, type]] = {
    "temperature": ("temperature", float),
    "top_k": ("top_k", int),
    "top_p": ("top_p", float),
    "min_p": ("min_p", float),
    "repetition_penalty": ("repeat_penalty", float),
    "max_new_tokens": ("num_predict", int),
}
# Files of a chat template beside tokenizer_config.json, which may contain one.
_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")


def modelfile_of(gguf: Path) -> Path:
    """Return the path of the Modelfile of the file `gguf`: run.gguf has run.Modelfile."""
    return gguf.with_suffix(SUFFIX)


def modelfile_text(folder: Path, gguf: Path) -> str:
    """Return the Modelfile of `gguf`, a file written from the exported `folder`.

    It has the sampling settings of generation_config.json, a stop for each token that ends a reply, the context if it
    is shorter than Ollama's smallest default, and for a model without chat template a template that passes prompts as
    they are. Raise ModelError for settings of the wrong type, and RefusedError for values that a Modelfile cannot
    contain.
    """
    settings = read_generation(folder) or {}
    context = families.from_hf(families.read_config(folder)).max_position_embeddings
    lines = [f"FROM {quoted('./' + gguf.name)}"]
    if not _has_chat_template(folder):
        lines.append(f"TEMPLATE {quoted('{{ .Prompt }}')}")
    lines += [f"PARAMETER stop {quoted(text)}" for text in _stops(folder, settings)]
    lines += [f"PARAMETER {name} {value}" for name, value in _sampling(settings).items()]
    if context < _SMALLEST_DEFAULT_CONTEXT:
        lines.append(f"PARAMETER num_ctx {context}")
    return "\n".join(lines) + "\n"


def quoted(value: str) -> str:
    '''Return `value` as Ollama reads it back: bare, or in "..." or """...""".

    A Modelfile has no escapes. Its parser drops characters that cannot be printed, ends a value at the first newline
    after closing quotes, and strips bare values. Raise RefusedError for values that it would change.
    '''
    if not all(letter.isprintable() or letter in "\n\t" for letter in value) or '"""\n' in value:
        raise RefusedError(
            f"Modelfile: the value {brief(value)} cannot be written, because Ollama drops characters that cannot be "
            'printed and ends a value at """ before a newline; rename the file or the token'
        )
    plain = value and value == value.strip() and not value.startswith('"') and "\n" not in value
    if plain and "<" not in value and "{" not in value:
        return value
    return f'"""{value}"""' if '"' in value or "\n" in value else f'"{value}"'


def _has_chat_template(folder: Path) -> bool:
    """True if the converter finds a chat template, which it writes into the GGUF file."""
    if any((folder / name).is_file() for name in _TEMPLATE_FILES):
        return True
    name = "tokenizer_config.json"
    return (folder / name).is_file() and bool(read_object(folder, name, infinity=True).get("chat_template"))


def _stops(folder: Path, settings: Mapping[str, Any]) -> list[str]:
    """Return the texts of the tokens in eos_token_id, each once; ids without a text are left to the GGUF file."""
    ids = settings.get("eos_token_id")
    ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
    texts = _token_texts(folder)
    return list(dict.fromkeys(texts[token] for token in ids if type(token) is int and token in texts))


def _token_texts(folder: Path) -> dict[int, str]:
    """Return the texts of the added tokens by id, from tokenizer.json, or else tokenizer_config.json."""
    entries: list[tuple[Any, Any]] = []
    if (folder / "tokenizer.json").is_file():
        added = read_object(folder, "tokenizer.json", bounds=TOKENIZER, infinity=True).get("added_tokens")
        entries = [(x.get("id"), x.get("content")) for x in added or () if isinstance(x, dict)]
    elif (folder / "tokenizer_config.json").is_file():
        decoder = read_object(folder, "tokenizer_config.json", infinity=True).get("added_tokens_decoder")
        items = decoder.items() if isinstance(decoder, dict) else ()
        entries = [(int(key), x.get("content")) for key, x in items if key.isdecimal() and isinstance(x, dict)]
    return {number: text for number, text in entries if type(number) is int and isinstance(text, str) and text}


def _sampling(settings: Mapping[str, Any]) -> dict[str, float | int]:
    """Return Ollama's parameters for `settings`, those of generation_config.json; do_sample=false means temperature 0.

    Parameters whose keys are missing are left to Ollama's defaults. Raise ModelError for a value of the wrong type.
    """
    parameters: dict[str, float | int] = {}
    for key, (name, kind) in _PARAMETERS.items():
        value = settings.get(key)
        if value is None:
            continue
        fits = type(value) in (int, kind) and math.isfinite(value) and value >= 0
        if not fits:
            raise ModelError(
                f"generation_config.json: {key}={brief(value)} must be a {'whole ' if kind is int else ''}number "
                "of at least 0; correct it"
            )
        parameters[name] = value
    if settings.get("do_sample") is False:
        parameters["temperature"] = 0
    return parameters
