"""Chat templates, special tokens and stop tokens from the files of a tokenizer, looked for as transformers does.

The files may come from anyone: they are read within bounds, and a template is only text here. `kumi.data.chat.sandbox`
renders it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kumi.data.tokenizer import Tokenizer
from kumi.errors import ConfigError
from kumi.files.untrusted import CONFIG, TOKENIZER, brief, explain, inside, read_bytes, read_object, read_regular
from kumi.spec.data_source import ChatOptions

# The largest published templates have 30 kB.
MAX_TEMPLATE = 1 << 20
DEFAULT, TOOL_USE = "default", "tool_use"
FILE, FOLDER, TOKENIZER_CONFIG = "chat_template.jinja", "additional_chat_templates", "tokenizer_config.json"
_NAMED_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


@dataclass(frozen=True)
class ChatTemplate:
    """The text of a chat template.

    origin: the file, for messages.
    digest: SHA-256 of the texts.
    tool_text: another text for conversations with tools, if the tokenizer has one named "tool_use".
    """

    text: str
    origin: str
    digest: str
    tool_text: str | None = None


def load_template(options: ChatOptions, folder: Path | str) -> ChatTemplate:
    """Return the chat template of a run: that of `options`, else that of the tokenizer in `folder`.

    `options.template` is the name of one of the tokenizer's templates, or a path. The tokenizer's are
    `chat_template.jinja` with the files of `additional_chat_templates`, else `chat_template` in its
    tokenizer_config.json. Raise ConfigError if there is none, or if it is unreadable or larger than `MAX_TEMPLATE`.
    """
    template = find_template(options, folder)
    if template is None:
        raise ConfigError(
            f"{folder}: the tokenizer has no chat template: no {FILE}, no chat_template in {TOKENIZER_CONFIG}; set "
            "data.chat.template to a Jinja file, such as the chat_template.jinja of the model's chat version"
        )
    return template


def find_template(options: ChatOptions, folder: Path | str) -> ChatTemplate | None:
    """Return the chat template as `load_template` does, or None if `options` names none and the tokenizer has none."""
    folder = Path(folder)
    texts, origin = _tokenizer_templates(folder)
    name = options.template
    if name is not None:
        if name in texts:
            return _template(texts[name], f"{origin} ({name})")
        path = Path(name).expanduser()
        if path.is_file():
            return _template(_read_named(path), str(path))
        among = f"none of {', '.join(sorted(texts))} in {origin}" if texts else f"{folder} has no chat templates"
        raise ConfigError(
            f"data.chat.template={name!r}: is no file, and {among}; name a Jinja file, or leave template out"
        )
    if DEFAULT in texts:
        return _template(texts[DEFAULT], origin, texts.get(TOOL_USE))
    if texts:
        raise ConfigError(
            f"{origin}: has several chat templates, none of them named {DEFAULT}; "
            f"set data.chat.template to one of {', '.join(sorted(texts))}"
        )
    return None


def _template(text: str, origin: str, tool_text: str | None = None) -> ChatTemplate:
    """Return the template of these texts. Raise ConfigError if one of them is longer than `MAX_TEMPLATE`."""
    for source in (text, tool_text or ""):
        if len(source) > MAX_TEMPLATE:
            raise ConfigError(
                f"{origin}: the chat template has {len(source)} characters, more than the limit of {MAX_TEMPLATE}; "
                "set data.chat.template to a shorter one"
            )
    digest = hashlib.sha256(text.encode(errors="surrogatepass"))
    if tool_text is not None:
        digest.update(b"\0" + tool_text.encode(errors="surrogatepass"))
    return ChatTemplate(text, origin, digest.hexdigest(), tool_text)


def _tokenizer_templates(folder: Path) -> tuple[dict[str, str], str]:
    """Return the templates of the tokenizer in `folder` by name, and the file or folder that has them."""
    texts: dict[str, str] = {}
    if (folder / FILE).is_file():
        texts[DEFAULT] = _decode(read_bytes(folder, FILE, ConfigError, MAX_TEMPLATE), folder / FILE)
    more = folder / FOLDER
    if more.is_dir():
        home = inside(folder, FOLDER, ConfigError)
        for path in sorted(home.glob("*.jinja")):
            texts[path.stem] = _decode(read_bytes(home, path.name, ConfigError, MAX_TEMPLATE), path)
    if texts:
        return texts, str(folder / FILE if list(texts) == [DEFAULT] else folder)
    config = folder / TOKENIZER_CONFIG
    return _named_templates(_json(folder, TOKENIZER_CONFIG).get("chat_template"), config), str(config)


def _named_templates(value: Any, path: Path) -> dict[str, str]:
    """Return the templates in `chat_template` of a tokenizer_config.json: a text, or several with names."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {DEFAULT: value}
    pairs = value
    if isinstance(value, list):
        if not all(isinstance(item, dict) and isinstance(item.get("name"), str) for item in value):
            raise ConfigError(f"{path}: chat_template={brief(value)} must be a text or a list of named templates")
        pairs = {item["name"]: item.get("template") for item in value}
    if not isinstance(pairs, dict) or not all(isinstance(text, str) for text in pairs.values()):
        raise ConfigError(f"{path}: chat_template={brief(value)} must be a text or a list of named templates")
    return pairs


def _read_named(path: Path) -> str:
    """Return the text of the template at `path`, which the user names."""
    try:
        return _decode(read_regular(path, MAX_TEMPLATE, follow=True), path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"data.chat.template={str(path)!r}: cannot be read ({explain(error)}); name a Jinja file of at most 1 MiB"
        ) from None


def _decode(raw: bytes, path: Path) -> str:
    """Return the text of the file `path`, with newlines as line ends. Raise ConfigError unless it is UTF-8."""
    try:
        return raw.decode().replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: the chat template is not UTF-8 at byte {error.start}; save it as UTF-8") from None


def load_tokens(folder: Path | str) -> dict[str, str]:
    """Return the special tokens that a template may write, such as {"bos_token": "<s>"}, as transformers passes them.

    They are the named tokens of tokenizer_config.json, its other keys that end in `_token`, and its dict
    `extra_special_tokens`; without an `added_tokens_decoder` there, those of special_tokens_map.json replace them.
    """
    folder = Path(folder)
    config = _json(folder, TOKENIZER_CONFIG)
    values = {
        key: value
        for key, value in config.items()
        if key in _NAMED_TOKENS or (key.endswith("_token") and isinstance(value, str))
    }
    extra = config.get("extra_special_tokens")
    if "added_tokens_decoder" not in config:
        mapping = _json(folder, "special_tokens_map.json")
        values.update({key: value for key, value in mapping.items() if key.endswith("_token")})
        extra = mapping.get("extra_special_tokens", extra)
    if isinstance(extra, dict):
        values.update(extra)
    contents = {key: value.get("content") if isinstance(value, dict) else value for key, value in values.items()}
    return {key: content for key, content in contents.items() if isinstance(content, str)}


def load_stops(tokenizer: Tokenizer, options: ChatOptions) -> tuple[str, ...]:
    """Return the texts of the tokens that end a reply; raise ConfigError unless each is one token of the vocabulary.

    They are `options.stop_tokens`, else those of eos_token_id in generation_config.json, else the tokenizer's eos.
    """
    backend = tokenizer.backend
    if options.stop_tokens:
        for text in options.stop_tokens:
            ids = backend.encode(text, add_special_tokens=False).ids
            if len(ids) != 1:
                raise ConfigError(
                    f"data.chat.stop_tokens: {text!r} is {len(ids)} tokens of {tokenizer.folder}, but a reply ends "
                    "with one; name tokens of its vocabulary"
                )
        return tuple(dict.fromkeys(options.stop_tokens))
    value = _json(tokenizer.folder, "generation_config.json").get("eos_token_id")
    stop_ids = value if isinstance(value, list) else [tokenizer.eos_id] if value is None else [value]
    for stop_id in stop_ids:
        known_id = type(stop_id) is int and 0 <= stop_id < 2**32 and backend.id_to_token(stop_id) is not None
        if not known_id:
            raise ConfigError(
                f"{tokenizer.folder / 'generation_config.json'}: eos_token_id {brief(stop_id)} is no token of "
                "tokenizer.json; correct it, or set data.chat.stop_tokens"
            )
    return tuple(dict.fromkeys(tokenizer.decode([stop_id]) for stop_id in stop_ids or [tokenizer.eos_id]))


def _json(folder: Path, name: str) -> Mapping[str, Any]:
    """Return the JSON object in the file `name` of `folder`; {} if there is no such file."""
    bounds = TOKENIZER if name == TOKENIZER_CONFIG else CONFIG
    return read_object(folder, name, ConfigError, bounds, infinity=True) if (folder / name).is_file() else {}
