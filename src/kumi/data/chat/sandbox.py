"""Render chat templates as transformers does, in jinja2's sandbox and within limits.

The environment is that of `transformers.utils.chat_template_utils` 5.23 with two exceptions, which make a rendering a
function of its arguments: `strftime_now` writes a given date, and `lipsum` and the filter `random` draw the same each
time. Templates cannot include others: there is no loader.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date, datetime
from types import BuiltinMethodType, MethodType
from typing import Any

from jinja2 import Template, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError, TemplateError, UndefinedError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, generate_lorem_ipsum

from kumi.data.chat.limits import ERROR, OUTPUT, Limits
from kumi.data.chat.masked import RowRefused
from kumi.data.chat.template import ChatTemplate
from kumi.errors import ConfigError
from kumi.files.untrusted import brief
from kumi.spec.data_source import ChatOptions

# A rendering has at most this many characters, and `OUTPUT_RATIO` more for each character of its input.
OUTPUT_FREE, OUTPUT_RATIO = 1 << 20, 64
# Arguments that neither a row nor the run file may set.
RESERVED = ("messages", "tools", "add_generation_prompt", "chat_template", "conversation")
# The keys under which a message may have its thoughts.
_REASONING = ("reasoning_content", "thinking", "reasoning")


class Renderer:
    """A compiled chat template with its fixed arguments.

    tokens: special tokens by name, as `kumi.data.chat.template.load_tokens` returns them.
    kwargs: arguments of the template.
    date: YYYY-MM-DD, the date that `strftime_now` formats.
    timeout_s, memory_gib: limits of one conversation; see `kumi.data.chat.limits`.

    Raise ConfigError unless the template can be compiled within the same limits.
    """

    def __init__(
        self,
        template: ChatTemplate,
        tokens: Mapping[str, str],
        kwargs: Mapping[str, Any] | None = None,
        date: str = ChatOptions.date,
        *,
        timeout_s: float = ChatOptions.timeout_s,
        memory_gib: float = ChatOptions.memory_gib,
    ) -> None:
        for name in kwargs or {}:
            if name in RESERVED:
                raise ConfigError(f"data.chat.template_kwargs: {name!r} is set by each conversation; leave it out")
        self.template, self.kwargs = template, dict(kwargs or {})
        self.limits = Limits(timeout_s, memory_gib)
        self._fixed = {**tokens, **_plain(dict(kwargs or {}))}
        environment = _environment(date)
        self._compiled = self._compile(environment, template.text)
        self._tool_compiled = self._compiled
        if template.tool_text is not None:
            self._tool_compiled = self._compile(environment, template.tool_text)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        prompt: bool = False,
        **kwargs: Any,
    ) -> str:
        """Return the text of `messages`; with `prompt`, followed by the start of a reply.

        Raise RowRefused if the template raises or exceeds a limit. All renderings between `limits.start()` and
        `limits.end()` share one limit of time; outside of them, each rendering has the limit to itself.
        """
        return self.limits.run(lambda: self._render(messages, tools, prompt, kwargs))

    def _compile(self, environment: ImmutableSandboxedEnvironment, text: str) -> Template:
        """Return the compiled template. Jinja computes constant expressions here, so the limits of rendering apply."""
        origin = self.template.origin
        try:
            return self.limits.run(lambda: _compile(environment, text, origin))
        except RowRefused as refused:
            reason = refused.reason
        raise ConfigError(f"{origin}: cannot be compiled: {reason}; set data.chat.template to another template")

    def _render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, prompt: bool, kwargs: dict[str, Any]
    ) -> str:
        """Return what `render` returns, without limits of time and memory."""
        compiled = self._compiled if tools is None else self._tool_compiled
        try:
            for name in kwargs:
                if name in RESERVED:
                    raise TemplateError(f"chat_template_kwargs may not set {name!r}")
            context = {
                "documents": None,
                **self._fixed,
                **{key: _plain(value) for key, value in kwargs.items()},
                "messages": [_message(message) for message in messages],
                "tools": _plain(tools),
                "add_generation_prompt": prompt,
            }
            return _join(compiled.root_render_func(compiled.new_context(context)), context)
        except (MemoryError, RowRefused):
            raise
        except Exception as error:
            raise RowRefused(ERROR, _explain(error, compiled, self.template.origin)) from None


def _compile(environment: ImmutableSandboxedEnvironment, text: str, origin: str) -> Template:
    """Return the compiled template `text` of the file `origin`. Raise ConfigError unless it is valid Jinja."""
    try:
        return environment.from_string(text)
    except TemplateSyntaxError as error:
        reason = f"line {error.lineno}: {brief(error.message)}"
    except MemoryError:
        raise
    except RecursionError:
        reason = "it is nested too deeply"
    except Exception as error:
        reason = f"{type(error).__name__}: {brief(str(error))}"
    raise ConfigError(f"{origin}: is no valid Jinja template: {reason}; correct it, or set data.chat.template")


def _join(pieces: Iterator[str], context: Mapping[str, Any]) -> str:
    """Return the pieces of a rendering as one text. Raise RowRefused when it grows beyond its limit."""
    result, total, limit, measured = [], 0, OUTPUT_FREE, False
    for piece in pieces:
        total += len(piece)
        if total > limit:
            if not measured:
                limit, measured = OUTPUT_FREE + OUTPUT_RATIO * _characters(context), True
            if total > limit:
                raise RowRefused(
                    OUTPUT,
                    f"the chat template writes more than {limit} characters, its limit: {OUTPUT_FREE}, and "
                    f"{OUTPUT_RATIO} for each character of its input",
                )
        result.append(piece)
    return "".join(result)


def _characters(value: Any) -> int:
    """Return the number of characters in all texts of `value`."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(len(str(key)) + _characters(item) for key, item in value.items())
    return sum(map(_characters, value)) if isinstance(value, list | tuple) else 1


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as templates take it: without null keys, its thoughts as "reasoning_content" and "thinking"."""
    plain = {key: _plain(value) for key, value in message.items() if value is not None}
    thoughts = next((plain[key] for key in _REASONING if key in plain), None)
    return plain if thoughts is None else {"thinking": thoughts, **plain, "reasoning_content": thoughts}


def _plain(value: Any) -> Any:
    """Return `value` as JSON types. An object of another type becomes the name of its type in angle brackets: such an
    object may have methods that the sandbox does not check.
    """
    kind = type(value)
    if kind is str or kind is int or kind is float or kind is bool or value is None:
        return value
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, tuple):
        return tuple(_plain(item) for item in value)
    for base in (str, int, float):
        if isinstance(value, base):
            return base(value)
    return f"<{kind.__name__}>"


def _explain(error: Exception, compiled: Template, origin: str) -> str:
    """Return a sentence with the template's line that raised `error`, and the message."""
    line, trace = 0, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            line = compiled.get_corresponding_lineno(trace.tb_lineno)
        trace = trace.tb_next
    where = f"{origin}:{line}" if line else origin
    if isinstance(error, RecursionError):
        return f"{where}: the chat template is nested too deeply, or a macro calls itself without end"
    name = "" if type(error) in (TemplateError, UndefinedError, SecurityError) else f" {type(error).__name__}"
    return f"{where}: the chat template raises{name} {brief(str(error), 300)}"


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with faster paths for what templates read most: attributes of dicts, texts, loops, namespaces."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return `obj.attribute`, or `obj[attribute]` of a dict."""
        kind = type(obj)
        if kind is dict and attribute not in _DICT_ATTRIBUTES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if kind is str and attribute in _STR_METHODS:
            return getattr(obj, attribute)
        if (kind is LoopContext or kind is _Namespace) and not attribute.startswith("_"):
            value = getattr(obj, attribute, self)
            if value is not self and type(value) not in (MethodType, BuiltinMethodType):
                return value
        return super().getattr(obj, attribute)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call `obj`, after the sandbox's checks unless it is a method of a text."""
        if type(obj) is BuiltinMethodType and type(obj.__self__) is str:
            # As in Context.call: arguments of the compiled code, not of the template.
            kwargs.pop("_block_vars", None)
            kwargs.pop("_loop_vars", None)
            return obj(*args, **kwargs)
        return super().call(context, obj, *args, **kwargs)


_DICT_ATTRIBUTES = frozenset(dir(dict))
# Without `format` and `format_map`, which the sandbox replaces.
_STR_METHODS = frozenset(name for name in dir(str) if not name.startswith(("_", "format")))


class _Generation(Extension):
    """The tag {% generation %}, which marks replies for transformers' masks; the text is that of its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the node of the tag at which `parser` is: its body, passed through `_write`."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_write"), [], [], body).set_lineno(line)

    def _write(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """The function `dict`, without the attributes of the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class _Namespace(Namespace):
    """Jinja's namespace, without names that begin with an underscore."""

    # As in jinja2, the first parameter has no name: `namespace(self=1)` is valid.
    def __init__(*args: Any, **kwargs: Any) -> None:
        self, args = args[0], args[1:]
        attributes = dict(*args, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        Namespace.__setitem__(self, name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace has no attribute {name!r}: names may not begin with an underscore")


def _environment(today: str) -> ImmutableSandboxedEnvironment:
    """Return an environment for chat templates, in which `today` (YYYY-MM-DD) is the date."""
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    moment = datetime.combine(date.fromisoformat(today), datetime.min.time())
    environment.filters["tojson"] = _to_json
    environment.filters["random"] = lambda items: random.Random(0).choice(items) if items else environment.undefined()
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda format: moment.strftime(format)
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _Namespace
    environment.globals["lipsum"] = _lipsum
    return environment


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Return `x` as JSON; unlike jinja2's own filter, without escapes for HTML."""
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _lipsum(n: int = 5, html: bool = True, min: int = 20, max: int = 100) -> str:
    """Return jinja2's random text, the same each time."""
    state = random.getstate()
    random.seed(0)
    try:
        return generate_lorem_ipsum(n, html, min, max)
    finally:
        random.setstate(state)
