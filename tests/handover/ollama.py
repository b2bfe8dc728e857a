"""How Ollama reads a Modelfile: the states of its parser (parser/parser.go of version 0.33.0-rc2), in Python."""

from __future__ import annotations

INSTRUCTIONS = ("from", "license", "template", "system", "adapter", "draft", "renderer", "parser", "parameter")
INSTRUCTIONS += ("message", "requires")


def parse(text: str) -> list[tuple[str, str]]:
    """The commands of a Modelfile, each with its value; those of parameters have the parameter's name.

    ValueError for what Ollama refuses.
    """
    commands: list[tuple[str, str]] = []
    state, name, letters = "nothing", "", ""
    for letter in text:
        state, name, letters = _step(commands, state, name, letters, letter)
    if state == "value":
        value = _unquoted(letters.strip())
        if value is None:
            raise ValueError("unexpected end of file")
        commands.append((name, value))
    elif state not in ("nothing", "comment"):
        raise ValueError("unexpected end of file")
    if not any(name == "from" for name, _ in commands):
        raise ValueError("no FROM line")
    return commands


def _step(commands: list[tuple[str, str]], state: str, name: str, letters: str, letter: str) -> tuple[str, str, str]:
    """The state, the command's name and the letters of the token so far, after one more letter."""
    space, newline = letter in " \t", letter in "\r\n"
    if state == "nothing":
        if letter == "#":
            return "comment", name, ""
        return (state, name, "") if space or newline else ("name", name, letter)
    if state == "comment":
        return ("nothing" if newline else state), name, ""
    if state == "value":
        value = _unquoted(letters.strip()) if newline else None
        if value is not None:
            commands.append((name, value))
            return "nothing", "", ""
        printable = letter.isprintable() or space or newline
        return state, name, letters + letter if printable else letters
    if space:
        if state == "parameter":
            return "value", letters, ""
        if letters.lower() not in INSTRUCTIONS:
            raise ValueError(f"command must be one of {INSTRUCTIONS}")
        return ("parameter" if letters.lower() == "parameter" else "value"), letters.lower(), ""
    allowed = letter.isascii() and (letter.isalpha() or (state == "parameter" and (letter.isdigit() or letter == "_")))
    if not allowed:
        raise ValueError("command must be one of the instructions")
    return state, name, letters + letter


def _unquoted(value: str) -> str | None:
    """The value without its quotes; None while they are open."""
    for quotes in ('"""', '"'):
        if value.startswith(quotes):
            closed = len(value) >= 2 * len(quotes) and value.endswith(quotes)
            return value[len(quotes) : -len(quotes)] if closed else None
    return value
