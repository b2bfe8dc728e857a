"""Templates and rows that attack `kumi data prepare`: each is a counted fault, and no other row is lost."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from chat_rows import message, write_rows

CHATS = Path(__file__).parents[2] / "examples/chat"
# One branch of the template for each attack; PLACE is a file that only executed code makes.
DOUBLED = "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}"
NESTED = "{% set ns = namespace(x=[1]) %}{% for i in range(20000) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x }}"
ATTACKS = {
    "loop": ("{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}", "template-time"),
    "search": ("{% set a = 'a' * 2000000 %}{{ a.rfind('ab' ~ a[:1000000]) }}", "template-time"),
    "memory": (DOUBLED, "template-memory"),
    "long text": ("{{ 'x' * 10**12 }}", "template-memory"),
    "wide number": ("{{ '%99999999999d'|format(1) }}", "template-memory"),
    "output": ("{% for i in range(100000) %}{{ 'x' * 1000 }}{% endfor %}", "template-output"),
    "class": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "template-error"),
    "globals": ("{{ lipsum.__globals__['os'].system('touch PLACE') }}", "template-error"),
    "cycler": ("{{ cycler.__init__.__globals__.os.system('touch PLACE') }}", "template-error"),
    "format": ("{{ '{0.__class__.__init__.__globals__}'.format(messages) }}", "template-error"),
    "mapped": ("{{ [messages]|map(attribute='__class__.__mro__')|first|first }}", "template-error"),
    "import": ("{% import 'os' as os %}{{ os.system('touch PLACE') }}", "template-error"),
    "include": ("{% include '/etc/passwd' %}", "template-error"),
    "append": ("{{ messages.append(1) }}", "template-error"),
    "recursion": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "template-error"),
    "nested": (NESTED, "template-error"),
    "escape": ("{{ raise_exception('\\x1b[31mred') }}", "template-error"),
    "silent": ("{% set messages = [] %}", "not-after-prompt"),
}


def template(place: Path) -> str:
    """Return a template that runs the attack that the first message of a conversation names."""
    parts = [
        f"{{%- if messages[0].content == 'attack {name}' %}}{text.replace('PLACE', str(place))}{{%- endif %}}"
        for name, (text, _) in ATTACKS.items()
        if name != "silent"
    ]
    head = "{%- if messages[0].content == 'attack silent' %}{% set messages = [] %}{%- endif %}"
    return "".join(parts) + head + (CHATS / "chat_template.jinja").read_text()


def asked(text: Any, reply: Any = "fine", **fields: Any) -> dict[str, Any]:
    return {"messages": [message("user", text), message("assistant", reply)], **fields}


def nested(levels: int) -> str:
    return '{"messages": ' + "[" * levels + "]" * levels + "}"


SURROGATE = '{"messages": [{"role": "user", "content": "\\ud800"}, {"role": "assistant", "content": "a"}]}'
NAN = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a", "weight": NaN}]}'
TWICE = '{"messages": [], "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}'
ROWS: dict[str, tuple[Any, str]] = {
    "deep": (nested(100_000), "broken-json"),
    "deep argument": (asked("a", tools="[" * 5000 + "]" * 5000), "too-deep"),
    "surrogate": (SURROGATE, "encoding"),
    "NaN": (NAN, "bad-weight"),
    "twice": (TWICE, "broken-json"),
    "no object": ("[1, 2]", "not-an-object"),
    "wrong list": ({"messages": "a text"}, "not-messages"),
    "wrong message": ({"messages": [1, 2]}, "not-messages"),
    "wrong content": (asked(5), "not-text"),
    "wrong role": ({"messages": [{"role": {"a": 1}, "content": "a"}]}, "unknown-role"),
    "unknown role": ({"messages": [message("robot", "a"), message("assistant", "b")]}, "unknown-role"),
    "image": (asked([{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]), "not-text"),
    "weight": ({"messages": [message("user", "a"), message("assistant", "b", weight=1e999)]}, "bad-weight"),
    "tools": (asked("a", tools="{not json"), "broken-tools"),
    "template kwargs": (asked("a", chat_template_kwargs={"messages": []}), "bad-template-kwargs"),
    "reserved kwargs": (asked("a", chat_template_kwargs={"chat_template": "{{ 1 }}"}), "bad-template-kwargs"),
    "stop token": (asked("a", "b<|im_end|>c"), "stop-spelt"),
    "binary": ("\x00\x01\x02\x7f", "broken-json"),
}


def run(arguments: list[str], folder: Path, memory_gib: int = 6) -> subprocess.CompletedProcess[str]:
    """Run kumi in `folder`; its processes have a limit of memory."""
    source = str(Path(__file__).parents[2] / "src")
    return subprocess.run(
        [sys.executable, "-m", "kumi", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": source},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (memory_gib << 30, memory_gib << 30)),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def run_file(folder: Path, sources: list[str], chat: str = "", top: str = "") -> Path:
    listed = ", ".join(f'{{ path = "{path}" }}' for path in sources)
    path = folder / "run.toml"
    path.write_text(
        f'name = "hostile"\n[model]\nsource = "{CHATS}"\ninit = "random"\n[cluster]\nsource = "auto"\n'
        f"[batch]\nseq_len = 512\ntokens_per_step = 1024\n"
        f'[data]\ntokenizer = "{CHATS}"\nsources = [{listed}]\nvalidation = 0\n{top}[data.chat]\n{chat}\n'
        '[train]\nsteps = 2\nout = "out"\n'
    )
    return path


def test_hostile_rows_are_counted_and_cost_nothing_else(tmp_path):
    place = tmp_path / "place"
    (tmp_path / "bad.jinja").write_text(template(place))
    rows: list[Any] = []
    expected: list[tuple[int, str]] = []
    attacks = [(asked(f"attack {name}"), kind) for name, (_, kind) in ATTACKS.items()]
    for number, (row, kind) in enumerate([*attacks, *ROWS.values()]):
        rows += [asked(f"good {number}"), row]
        expected.append((len(rows), kind))
    write_rows(tmp_path / "rows.jsonl", rows)
    # A machine whose memory is slow takes more than 0.3 s to reach the limit of memory.
    limits = 'template = "bad.jinja"\ntimeout_s = 2\nmemory_gib = 0.2\nmax_refused = 0.6'
    run_file(tmp_path, ["rows.jsonl"], limits)
    result = run(["data", "prepare", "run.toml"], tmp_path)
    assert result.returncode == 0, result.stderr
    output = result.stdout + result.stderr
    assert "Traceback" not in output
    assert "\x1b" not in output
    assert not place.exists()
    store = tmp_path / "out/data/tokens"
    faults = [json.loads(line) for line in (store / "faults.jsonl").read_text().splitlines()]
    assert [(fault["line"], fault["kind"]) for fault in faults] == expected
    assert all(fault["file"] == str(tmp_path / "rows.jsonl") and fault["reason"].isprintable() for fault in faults)
    (entry,) = json.loads((store / "meta.json").read_text())["sources"]
    assert entry["faults"] == Counter(kind for _, kind in expected)
    assert (entry["rows"], entry["train_units"]) == (len(rows), len(rows) - len(expected))


GOOD = json.dumps(asked("hi")) + "\n"
LOOPS = "".join(json.dumps(asked("attack loop")) + "\n" for _ in range(3))
FILES: dict[str, tuple[dict[str, Any], int, str]] = {
    "a pipe as template": ({"a.jsonl": GOOD, "t.jinja": os.mkfifo}, 2, "is no file"),
    "a folder as template": ({"a.jsonl": GOOD, "t.jinja": os.mkdir}, 2, "is no file"),
    "a template of 10 MB": ({"a.jsonl": GOOD, "t.jinja": "x" * 10**7}, 2, "more than the limit of 1048576"),
    "a template of bytes": ({"a.jsonl": GOOD, "t.jinja": b"\x80\xff" * 500}, 2, "is not UTF-8 at byte 0"),
    "bytes as JSONL": ({"a.jsonl": b"\x80\xff\n" * 500, "t.jinja": "x"}, 2, "500 encoding"),
    "an open list as JSON": ({"a.json": "[" * 10**6, "t.jinja": "x"}, 2, "1 unreadable"),
    "bytes as parquet": ({"a.parquet": b"PAR1" + b"\x80" * 500 + b"PAR1", "t.jinja": "x"}, 2, "1 unreadable"),
    "three loops": ({"a.jsonl": GOOD + LOOPS + GOOD, "t.jinja": template(Path("no"))}, 3, "3 rows in succession"),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FILES)
def test_hostile_files_end_in_one_sentence(tmp_path, name):
    files, code, sentence = FILES[name]
    for file, content in files.items():
        if callable(content):
            content(tmp_path / file)
        else:
            (tmp_path / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    run_file(tmp_path, [next(iter(files))], 'template = "t.jinja"\ntimeout_s = 0.3')
    result = run(["data", "prepare", "run.toml"], tmp_path)
    assert result.returncode == code, result.stderr
    assert sentence in result.stderr
    assert "Traceback" not in result.stdout + result.stderr
