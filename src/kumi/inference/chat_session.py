"""A conversation with a model in a terminal: its replies appear as their tokens come."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from kumi.errors import KumiError
from kumi.inference.conversation_cache import ConversationCache
from kumi.inference.generation import Generation
from kumi.safe_output import visible

HELP = "/reset begins a new conversation, /exit or Ctrl-D ends; Ctrl-C ends a reply"


class ChatSession:
    """The turns of a conversation so far, and their cache. `write`: shows text, which is escaped already."""

    def __init__(self, generation: Generation, write: Callable[[str], None]) -> None:
        self._generation, self._settings, self._write = generation, generation.settings, write
        self.messages: list[dict[str, Any]] = []
        self.cache = ConversationCache()

    def reset(self) -> None:
        """Forget all turns."""
        self.messages.clear()
        self.cache.forget()

    def answer(self, text: str) -> str:
        """Show the reply to `text` as it is generated, and add both to the conversation; return the reply.

        Without a chat template, `text` is continued, and nothing is remembered. Ctrl-C ends the reply, and the part
        that was shown stays in the conversation. Raise KumiError for a conversation that the model cannot take; then
        the turns stay as they were.
        """
        has_template = self._settings.template is not None
        messages = [*self.messages, {"role": "user", "content": text}]
        [prompt] = self._settings.encode([messages if has_template else text])
        generator = self._generation.generator([prompt], cache_bytes=self.cache.nbytes)
        stream = self._settings.stream(prompt)
        started, finish, count = time.monotonic(), "interrupted", 0

        def show(index: int, sample: int, ids: Sequence[int]) -> None:
            nonlocal count
            count = len(ids)
            self._write(visible(stream.grow(ids)))

        try:
            for reply in generator.converse(self.cache, prompt, on_token=show):
                self._write(visible(stream.grow(reply.ids, ended=True)))
                finish, count = reply.finish, len(reply.ids)
        except KeyboardInterrupt:
            pass
        seconds = time.monotonic() - started
        rate, computed = count / max(seconds, 1e-9), f"{self.cache.computed} of {len(prompt)} prompt tokens computed"
        self._write(f"\n({finish}, {count} tokens, {rate:.0f} tokens/s, {computed})\n")
        if has_template:
            self.messages = [*messages, {"role": "assistant", "content": stream.text}]
        return stream.text


def chat(generation: Generation, read: Callable[[str], str], write: Callable[[str], None]) -> None:
    """Answer the lines of `read` until one is /exit, or until `read` raises EOFError.

    read: shows a prompt and returns the next line, as `input` does. write: shows text.
    """
    session = ChatSession(generation, write)
    if generation.settings.template is None:
        write("no chat template: each line is continued as text, and nothing is remembered\n")
    write(f"{HELP}\n")
    while True:
        try:
            line = read("> ").strip()
        except EOFError:
            write("\n")
            return
        except KeyboardInterrupt:
            write(f"\n{HELP}\n")
            continue
        except UnicodeDecodeError:
            write("this line is not in the terminal's encoding; type it again\n")
            continue
        if line in ("/exit", "/quit"):
            return
        if line == "/reset":
            session.reset()
            write("a new conversation\n")
        elif line == "/help":
            write(f"{HELP}\n")
        elif line:
            try:
                session.answer(line)
            except KumiError as error:
                write(f"{type(error).__name__}: {error}\n")
