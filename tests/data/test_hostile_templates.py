"""Templates that attack the process which renders them: none runs code, each costs its row alone, within limits."""

from pathlib import Path

import pytest

from kumi.data import pool
from kumi.data.chat import RowRefused
from kumi.data.chat.sandbox import Renderer
from kumi.data.chat.template import ChatTemplate
from kumi.data.row_guard import StoppedError, check_refused
from kumi.errors import ConfigError

GROW = "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}"
NEST = "{% set ns = namespace(x=[1]) %}{% for i in range(20000) %}{% set ns.x = [ns.x] %}{% endfor %}"
SHARE = "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
TOWER = "{% set ns = namespace(x=[1]) %}{% for i in range(20000) %}{% set ns.x = ns.x|map('upper') %}{% endfor %}"
HOSTILE = {
    "loops": ("{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}", "template-time"),
    "a shared list as JSON": (SHARE + "{{ ns.x|tojson }}", "template-time"),
    "a shared list in an error": (SHARE + "{{ raise_exception(ns.x) }}", "template-time"),
    "lorem ipsum": ("{{ lipsum(n=10**7)|length }}", "template-time"),
    "a list that doubles": (GROW, "template-memory"),
    "a long text": ("{{ messages[0].content * 10**12 }}", "template-memory"),
    "a wide number": ("{{ '%99999999999d'|format(messages|length) }}", "template-memory"),
    "a wide field": ("{{ '{:>99999999999}'.format(messages[0].content) }}", "template-memory"),
    "a replaced text": ("{{ ('a' * 10**6)|replace('a', 'b' * 10**6)|length }}", "template-memory"),
    "output": ("{% for i in range(100000) %}{{ 'x' * 1000 }}{% endfor %}", "template-output"),
    "output of a macro": (
        "{% macro m() %}{% for i in range(2000) %}{{ 'x' * 1000 }}{% endfor %}{% endmacro %}{{ m() }}",
        "template-output",
    ),
    "a class": ("{{ ''.__class__.__mro__ }}", "template-error"),
    "a class in a format": ("{{ '{0.__class__.__mro__}'.format(messages) }}", "template-error"),
    "globals of a function": ("{{ lipsum.__globals__['os'].system('touch PLACE') }}", "template-error"),
    "globals of a class": ("{{ cycler.__init__.__globals__.os.system('touch PLACE') }}", "template-error"),
    "globals of a joiner": ("{{ joiner.__init__.__globals__ }}", "template-error"),
    "a namespace": ("{% set ns = namespace() %}{% set ns.__class__ = 1 %}", "template-error"),
    "a change of the row": ("{{ messages.append(1) }}", "template-error"),
    "a macro without end": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "template-error"),
    "a long range": ("{% for i in range(10**9) %}{% endfor %}", "template-error"),
    "another file": ("{% include '/etc/passwd' %}", "template-error"),
    "a module": ("{% import 'os' as os %}{{ os.system('touch PLACE') }}", "template-error"),
    "nested lists": (NEST + "{{ ns.x }}", "template-error"),
    "nested iterators": (TOWER + "{{ ns.x|list }}", "template-error"),
    "an escape sequence": ("{{ raise_exception('\x1b[31m') }}", "template-error"),
}
# Render to nothing, as in transformers.
HARMLESS = ["{{ ''|attr('__class__') }}", "{{ messages['__class__'] }}", "{{ self._TemplateReference__context }}"]
UNCOMPILABLE = {
    "brackets": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "signs": "{{ " + "-" * 100_000 + "1 }}",
    "conditions": "{% if x %}" * 3000 + "{% endif %}" * 3000,
    "loops": "{% for a in x %}" * 100 + "{% endfor %}" * 100,
    "no end": "{% if x %}",
}


def renderer(text: str, **limits) -> Renderer:
    return Renderer(ChatTemplate(text, "t.jinja", ""), {}, **{"timeout_s": 0.3, "memory_gib": 0.1, **limits})


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the limit may end a finaliser
@pytest.mark.parametrize(("text", "kind"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_template_costs_its_row(text, kind, tmp_path):
    place = tmp_path / "place"
    # A machine whose memory is slow takes more than 0.3 s to reach the limit of memory.
    limits = {} if kind == "template-time" else {"timeout_s": 5}
    with pytest.raises(RowRefused) as refused:
        renderer(text.replace("PLACE", str(place)), **limits).render([{"role": "user", "content": "a"}])
    assert refused.value.kind == kind
    assert refused.value.reason.isprintable()
    assert "Traceback" not in refused.value.reason
    assert len(refused.value.reason) < 500
    assert not place.exists()


@pytest.mark.parametrize("text", HARMLESS)
def test_private_attributes_are_undefined(text):
    assert renderer(text).render([{"role": "user", "content": "a"}]) == ""


@pytest.mark.parametrize("text", UNCOMPILABLE.values(), ids=UNCOMPILABLE)
def test_a_template_that_cannot_be_compiled_is_refused(text):
    with pytest.raises(ConfigError, match=r"^t\.jinja: .*; (correct it, or )?set data\.chat\.template") as error:
        renderer(text)
    assert "Traceback" not in str(error.value)


def test_a_row_after_a_bomb_is_rendered():
    text = "{% if messages[0].content == 'bomb' %}" + GROW + "{% endif %}{{ messages[0].content }}"
    bomb = renderer(text, timeout_s=5)
    for _ in range(3):
        with pytest.raises(RowRefused):
            bomb.render([{"role": "user", "content": "bomb"}])
        assert bomb.render([{"role": "user", "content": "good"}]) == "good"


def test_output_is_limited_by_its_input():
    text = "{% for i in range(n) %}{{ messages[0].content }}{% endfor %}"
    content = "x" * (1 << 20)
    roomy = renderer(text, memory_gib=1, timeout_s=2)
    assert len(roomy.render([{"role": "user", "content": content}], n=64)) == 64 << 20
    with pytest.raises(RowRefused, match="64 for each character of its input"):
        roomy.render([{"role": "user", "content": content}], n=66)


# One call of compiled code, which handles no signal.
SEARCH = "{% set a = 'a' * 2000000 %}{{ a.rfind('ab' ~ a[:1000000]) }}"


def run(monkeypatch, jobs, workers):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    return dict(pool.run_jobs(jobs, workers, "render_worker"))


def test_a_worker_that_does_not_return_is_replaced_and_its_row_refused(monkeypatch):
    text = "{% if messages[0].content == 'bomb' %}" + SEARCH + "{% endif %}{{ messages[0].content }}"
    rows = [["a", "bomb", "b"], ["c", "d"]]
    answers = run(monkeypatch, [{"template": text, "rows": row} for row in rows], 2)
    reason = "the chat template takes more than 0.3 s (data.chat.timeout_s)"
    assert answers == {0: {"result": ["a", ["template-time", reason], "b"]}, 1: {"result": ["c", "d"]}}


def test_the_preparation_stops_after_three_timeouts_in_succession(monkeypatch):
    rows = ["bomb", "a", "bomb", "bomb", "bomb"]
    text = "{% if messages[0].content == 'bomb' %}" + HOSTILE["loops"][0] + "{% endif %}"
    answer = run(monkeypatch, [{"template": text, "rows": rows}], 1)[0]
    assert answer["kind"] == "StoppedError"
    assert answer["error"].startswith("t.jinja: 3 rows in succession are refused, each because the chat template takes")


def test_a_template_that_ends_the_process_when_compiled_stops_the_preparation(monkeypatch):
    # A constant, which jinja2 computes in one call of compiled code when it compiles the template.
    constant = "{{ [[1] * 10000] * 1000000 == [[1] * 10000] * 1000000 }}"
    with pytest.raises(StoppedError, match=r"t\.jinja: compiling the chat template ended the process"):
        run(monkeypatch, [{"template": constant, "rows": ["a"]}], 1)


def test_too_many_refused_rows_stop_the_preparation():
    check_refused("chats.jsonl", "t.jinja", 100, {"template-error": 5}, ["line 1: no"], 0.05)
    with pytest.raises(
        StoppedError, match=r"6 of 100 rows.*t\.jinja \(5 template-error, 1 no-stop\).*line 1: no"
    ) as error:
        check_refused("chats.jsonl", "t.jinja", 100, {"no-stop": 1, "template-error": 5}, ["line 1: no"], 0.05)
    assert error.value.exit_code == 3
