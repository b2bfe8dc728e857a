"""Formats by their columns, and rows converted to examples; hostile rows are refused in a sentence."""

from __future__ import annotations

import json
from dataclasses import asdict

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kumi.data.chat import RowRefused
from kumi.data.formats import Conversation, Example, Format, PlainText, detect, detect_source, split_columns, to_example
from kumi.data.formats.columns import COLUMNS
from kumi.data.formats.messages import ALIASES, read_template_kwargs
from kumi.data.record_files import Fault
from kumi.data.row_files import read_rows
from kumi.errors import ConfigError
from kumi.spec.data_source import ROW_KINDS, Source

U, A, A2 = ({"role": role, "content": text} for role, text in (("user", "q"), ("assistant", "a"), ("assistant", "b")))
S = {"role": "system", "content": "s"}
GPT, GPT2, HUMAN = ({"from": name, "value": text} for name, text in (("gpt", "a"), ("gpt", "b"), ("human", "q")))


def convert(row, source=None, line=3):
    return to_example(detect([row], source or Source("x")), row, "f", line)


def conversation(*messages, train=None, **more):
    train = tuple(m["role"] == "assistant" for m in messages) if train is None else train
    return Conversation(messages, train, more.pop("weight", (1.0,) * len(messages)), **more)


def refused(row, source=None):
    with pytest.raises(RowRefused) as caught:
        convert(row, source)
    assert caught.value.reason
    assert "\n" not in caught.value.reason
    return caught.value.kind


PAIR = (conversation(U, A, train=(False, True)), conversation(U, A2, train=(False, True)))
DETECTED = [
    ("chat", {"messages": [U, A], "id": 1}, ["id"], (conversation(U, A),)),
    ("chat", {"conversations": [HUMAN, GPT]}, [], (conversation(U, A),)),
    (
        "chat",
        {"messages": [U, A], "conversations": [HUMAN], "prompt": "q"},
        ["conversations", "prompt"],
        (conversation(U, A),),
    ),
    ("chat", {"conversations": [HUMAN, GPT], "system": "s"}, [], (conversation(S, U, A),)),
    ("chat", {"messages": [S, U, A], "system": "s"}, [], (conversation(S, U, A),)),
    ("chat", {"messages": [U, A], "chosen": None, "rejected": None}, [], (conversation(U, A),)),
    ("prompt-completion", {"prompt": "q", "completion": " a"}, [], (PlainText("q", " a"),)),
    ("prompt-completion", {"prompt": [U], "completion": [A], "text": "x"}, ["text"], (PAIR[0],)),
    (
        "prompt-completion",
        {"prompt": [U, A, U], "completion": A2},
        [],
        (conversation(U, A, U, A2, train=(False, False, False, True)),),
    ),
    ("instruction", {"instruction": "q", "input": "", "output": "a", "text": "x"}, ["text"], (conversation(U, A),)),
    ("preference", {"prompt": "q", "chosen": "a", "rejected": "b"}, [], (PlainText("q", "a"), PlainText("q", "b"))),
    ("preference", {"prompt": [U], "chosen": [A], "rejected": [A2]}, [], PAIR),
    ("preference", {"prompt": [U], "chosen": [U, A], "rejected": [U, A2]}, [], PAIR),
    ("preference", {"chosen": [U, A], "rejected": [U, A2]}, [], PAIR),
    ("preference", {"prompt": "q", "chosen": [U, A], "rejected": [U, A2]}, [], PAIR),
    ("preference", {"prompt": HUMAN, "chosen": GPT, "rejected": GPT2}, [], PAIR),
    ("preference", {"conversations": [HUMAN], "chosen": GPT, "rejected": GPT2}, [], PAIR),
    ("preference", {"instruction": "q", "chosen": "a", "rejected": "b"}, [], PAIR),
    (
        "preference",
        {"prompt": "q", "chosen": "a", "rejected": "b", "system": "s", "input": "x"},
        ["system", "input"],
        (PlainText("q", "a"), PlainText("q", "b")),
    ),
    ("feedback", {"prompt": "q", "completion": "a", "label": False}, [], (PlainText("q", "a"),)),
    ("feedback", {"prompt": [U], "completion": [A], "label": False}, [], (PAIR[0],)),
    (
        "feedback",
        {"conversations": [HUMAN, GPT, HUMAN, GPT2], "kto_tag": False},
        [],
        (conversation(U, A, U, A2, train=(False, False, False, True)),),
    ),
    ("feedback", {"instruction": "q", "output": "a", "desirable": False}, [], (PAIR[0],)),
    ("prompt", {"prompt": "q", "answer": "4"}, [], (PlainText("q", ""),)),
    ("prompt", {"prompt": [U], "answer": "4"}, [], (conversation(U),)),
]


@pytest.mark.parametrize(("kind", "row", "ignored", "sides"), DETECTED)
def test_a_row_s_columns_give_its_kind(kind, row, ignored, sides):
    form = detect([row], Source("x"))
    assert (form.kind, list(form.ignored)) == (kind, ignored)
    assert set(form.used) == {name for name, value in row.items() if value is not None} - set(ignored)
    assert Format(**json.loads(json.dumps(asdict(form)))).kind == kind
    example = to_example(form, row, "f", 3)
    extra = {"answer": "4"} if kind == "prompt" else {}
    label = False if kind == "feedback" else None
    assert example == Example(kind, sides, "f", 3, label=label, extra=extra)
    # With the kind set, the same example.
    assert convert(row, Source("x", kind=kind)) == example
    # Under other names, too.
    renamed = {f"my {name}": value for name, value in row.items()}
    columns = {name: f"my {name}" for name in row if name in COLUMNS[kind] and row[name] is not None}
    if kind != "prompt":
        assert convert(renamed, Source("x", kind=kind, columns=columns)).sides == sides


def test_every_kind_is_detected():
    assert {kind for kind, *_ in DETECTED} | {"auto", "text"} == set(ROW_KINDS)


# Importing TRL takes seconds.
@pytest.mark.exhaustive
def test_trl_sees_the_same_messages_and_prompts():
    data_utils = pytest.importorskip("trl.data_utils")
    compared = 0
    for kind, row, *_ in DETECTED:
        columns = {name: value for name, value in row.items() if value is not None}
        repeats = "prompt" in row and isinstance(row["prompt"], list) and row.get("chosen", [])[:1] == row["prompt"]
        if repeats or kind not in ("chat", "prompt-completion", "preference") or {"instruction", "system"} & set(row):
            continue  # columns that TRL does not read; of a repeated prompt it makes two
        if {"messages", "conversations"} <= set(row):
            continue  # TRL takes the second
        if {"conversations", "chosen"} <= set(columns):
            columns["prompt"] = columns.pop("conversations")
        theirs = data_utils.maybe_convert_to_chatml(
            json.loads(json.dumps({n: _as_list(v) for n, v in columns.items()}))
        )
        theirs = data_utils.maybe_extract_prompt(theirs)
        names = ("chosen", "rejected") if "chosen" in columns else ("messages" if kind == "chat" else "completion",)
        for side, name in zip(convert(row).sides, names, strict=True):
            conversational = isinstance(side, Conversation)
            assert data_utils.is_conversational({name: theirs[name]}) == conversational
            prompt = theirs["prompt"] if kind != "chat" else []
            if conversational:
                # TRL keeps the names of ShareGPT's roles.
                both = [
                    message | {"role": ALIASES.get(message["role"], message["role"])}
                    for message in prompt + theirs[name]
                ]
                assert list(side.messages) == both
            else:
                assert (side.prompt, side.completion) == (prompt, theirs[name])
            compared += 1
    assert compared >= 12


def _as_list(value):
    return [value] if isinstance(value, dict) else value


def test_text_stays_text():
    assert detect([{"text": "x", "prompt": "p"}], Source("x")) == Format("text")
    assert detect([{"body": "x"}], Source("x", text_key="body")) == Format("text")
    assert detect([], Source("x")) == Format("text")


@pytest.mark.parametrize(
    ("rows", "source", "words"),
    [
        ([{"body": "x"}], Source("x"), "its columns \\(body\\) fit no kind"),
        ([{"instruction": "x", "response": "y"}], Source("x"), "instruction: instruction and output"),
        ([{"messages": [U, A], "chosen": [A], "rejected": [A2]}], Source("x"), "set kind to 'chat'"),
        ([{"messages": [U, A]}], Source("x", columns={"mesages": "messages"}), "columns.mesages is no column"),
        ([{"messages": [U, A]}], Source("x", columns={"messages": "dialog"}), "columns names 'dialog'"),
        ([{"messages": [U, A]}], Source("x", kind="feedback"), "needs prompt, completion and label"),
    ],
)
def test_a_source_of_no_kind_is_an_error(tmp_path, rows, source, words):
    path = tmp_path / "a.jsonl"
    path.write_text("not JSON\n" + "\n".join(map(json.dumps, rows)))
    with pytest.raises(ConfigError, match=words):
        detect_source(source, [(path, "jsonl")])


def test_detection_reads_the_first_file_with_rows_and_takes_the_kind_of_most(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n")
    rows = [{"text": "x"}, *[{"messages": [U | {"id": 4}, A], "n": n} for n in range(3)]]
    (tmp_path / "b.json").write_text(json.dumps(rows))
    form = detect_source(Source("x"), [(tmp_path / "a.jsonl", "jsonl"), (tmp_path / "b.json", "json")])
    assert (form.kind, form.used, form.ignored) == ("chat", ("messages",), ("text", "n", "messages[].id"))
    with pytest.raises(RowRefused, match=r"needs messages or conversations; this one has text"):
        to_example(form, rows[0], "f", 1)
    with pytest.raises(ConfigError, match="only text or tokens"):
        detect_source(Source("x", kind="chat"), [(tmp_path / "a.txt", "text")])
    assert detect_source(Source("x"), [(tmp_path / "a.txt", "text")]) == Format("text")


def test_a_table_with_unreadable_rows_has_the_kind_of_its_columns(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist([{"messages": [U, A], "n": n} for n in range(9)]), path, compression="none")
    content = bytearray(path.read_bytes())
    end = pq.read_metadata(path).row_group(0).column(0).dictionary_page_offset + 40
    content[4:end] = b"\xff" * (end - 4)
    path.write_bytes(content)
    assert [type(item) for item in read_rows(path, "parquet")] == [Fault]
    form = detect_source(Source("x"), [(path, "parquet")])
    assert (form.kind, form.used, form.ignored) == ("chat", ("messages",), ("n",))
    # A file that is no table at all says nothing; the preparation counts it.
    path.write_bytes(b"PAR1" + b"\x80" * 50 + b"PAR1")
    assert detect_source(Source("x"), [(path, "parquet")]).kind == "text"


def test_a_row_of_another_kind_is_refused_unless_the_kind_is_set():
    chat, both = detect([{"messages": [U, A]}], Source("x")), {"messages": [U, A], "kto_tag": True}
    with pytest.raises(RowRefused, match="those of 'feedback', and its source is 'chat'"):
        to_example(chat, both, "f", 1)
    assert to_example(detect([both], Source("x", kind="chat")), both, "f", 1).kind == "chat"
    for kind, row, *_ in DETECTED:
        if kind != "chat":
            with pytest.raises(RowRefused):
                to_example(chat, row, "f", 1)


def test_columns_of_later_rows_are_split_as_those_of_the_first():
    assert split_columns("chat", {"messages": "dialog"}, ["dialog", "messages", "tools", "x"]) == (
        ["dialog", "tools"],
        ["messages", "x"],
    )
    assert split_columns("prompt", {}, ["prompt", "x"]) == (["prompt", "x"], [])


def test_roles_thoughts_and_tool_calls_are_spelt_as_templates_read_them():
    call = json.dumps({"name": "f", "arguments": {"x": None}})
    row = {
        "conversations": [
            {"from": "system", "value": "s"},
            HUMAN,
            {"from": "function_call", "value": call},
            {"from": "observation", "value": "r"},
            {"from": "gpt", "value": "a", "thinking": "t", "reasoning": "u"},
            {"role": "tool", "content": "r", "tool_call_id": "1", "name": "f"},
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": None,
                "reasoning": "u",
                "tool_calls": [
                    {"type": "function", "id": None, "function": {"name": "f", "arguments": '{"x": [1, null]}'}},
                    {"name": "g", "arguments": "ls -l"},
                ],
            },
        ],
        "tools": json.dumps([{"name": "f"}]),
        "chat_template_kwargs": {"enable_thinking": False, "other": None},
    }
    (side,) = convert(row).sides
    assert side.messages == (
        {"role": "system", "content": "s"},
        U,
        {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": {"x": None}}]},
        {"role": "tool", "content": "r"},
        {"role": "assistant", "content": "a", "reasoning_content": "t"},
        {"role": "tool", "content": "r", "tool_call_id": "1", "name": "f"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "u",
            "tool_calls": [
                {"type": "function", "function": {"name": "f", "arguments": {"x": [1, None]}}},
                {"name": "g", "arguments": "ls -l"},
            ],
        },
    )
    assert (side.tools, side.template_kwargs) == ([{"name": "f"}], {"enable_thinking": False})


def test_reasoning_is_taken_as_transformers_takes_it():
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    keys = ("reasoning_content", "thinking", "reasoning")
    for values in [(a, b, c) for a in (None, "x") for b in (None, "y") for c in (None, "z")]:
        message = {**A, **{key: value for key, value in zip(keys, values, strict=True) if value is not None}}
        (theirs,) = utils._alias_reasoning_fields([message])
        mine = convert({"messages": [U, message]}).sides[0].messages[1]
        assert mine.get("reasoning_content") == theirs.get("reasoning_content")


def test_parts_of_text_are_joined_and_train_and_weight_are_read():
    parts = [{"type": "text", "text": "q"}, {"text": "r", "image": None}]
    row = {
        "messages": [
            U | {"content": parts, "train": False},
            A | {"train": False},
            U,
            A | {"weight": 0},
            U,
            A2 | {"train": True, "weight": 2},
        ]
    }
    (side,) = convert(row).sides
    assert side.messages[0]["content"] == "qr"
    assert side.train == (False,) * 5 + (True,)
    assert side.weight == (1.0, 1.0, 1.0, 0.0, 1.0, 2.0)


def test_an_instruction_with_input_history_and_system():
    row = {"instruction": "do", "input": "this", "output": "a", "system": "s", "history": [["h", "r"]]}
    messages = (S, U | {"content": "h"}, A | {"content": "r"}, U | {"content": "do\nthis"}, A)
    assert convert(row).sides == (conversation(*messages),)


DEEP = json.loads("[" * 200 + "]" * 200)
HALF = "\ud800"
NAN, BIG = float("nan"), 10**400


def chat(*messages, **columns):
    return {"messages": list(messages), **columns}


REFUSED = [
    ("no-reply", chat()),
    ("no-reply", chat(U)),
    ("no-reply", chat(S)),
    ("assistant-first", chat(A, U, A)),
    ("assistant-first", chat(S, A)),
    ("assistant-first", {"prompt": [], "completion": [A]}),
    ("no-reply", {"prompt": [U], "completion": [U, A]}),
    ("no-reply", {"prompt": [U], "completion": []}),
    ("unknown-role", chat(U, A | {"role": "model"})),
    ("unknown-role", chat(U, A | {"role": DEEP})),
    ("unknown-role", chat(U, {"content": "a"})),
    ("unknown-role", chat({"role": "", "content": "a"}, A)),
    ("empty-completion", chat(U, A | {"content": " \n"})),
    ("empty-completion", chat(U, A | {"content": None})),
    ("empty-completion", chat(U, A | {"content": [], "tool_calls": []})),
    ("empty-completion", {"prompt": "q", "completion": " "}),
    ("empty-completion", {"instruction": "q", "output": ""}),
    ("empty-completion", {"prompt": "q", "chosen": "", "rejected": "a"}),
    ("empty-completion", {"chosen": [U], "rejected": [U, A]}),
    ("sides-equal", {"prompt": "q", "chosen": "a", "rejected": "a"}),
    ("sides-equal", {"chosen": [U, A], "rejected": [U, A]}),
    ("sides-equal", {"prompt": [U], "chosen": [U, A], "rejected": [HUMAN, GPT]}),
    ("no-prompt", {"chosen": "a", "rejected": "b"}),
    ("no-prompt", {"chosen": [A], "rejected": [A2]}),
    ("prompts-differ", {"chosen": [U, A, U, A], "rejected": [U, A, HUMAN | {"value": "other"}, GPT2]}),
    ("mixed-types", {"prompt": [U], "chosen": "a", "rejected": "b"}),
    ("mixed-types", {"prompt": [U], "chosen": "a", "rejected": [A]}),
    ("mixed-types", {"prompt": "q", "completion": [A]}),
    ("not-messages", {"messages": "hello"}),
    ("not-messages", {"messages": 7}),
    ("not-messages", chat("hello")),
    ("not-messages", chat(DEEP)),
    ("not-messages", {"instruction": "q", "output": "a", "history": [["q"]]}),
    ("not-messages", {"instruction": "q", "output": "a", "history": "q"}),
    ("not-text", chat(U | {"content": 7}, A)),
    ("not-text", chat(U | {"content": {"text": "q"}}, A)),
    ("not-text", chat(U | {"content": [{"type": "image", "url": "x"}]}, A)),
    ("not-text", chat(U | {"content": [{"type": "text", "text": None}]}, A)),
    ("not-text", chat(U | {"content": ["q"]}, A)),
    ("not-text", chat(U, A | {"reasoning": ["t"]})),
    ("not-text", chat(U, A | {"name": 7})),
    ("not-text", chat(U, A, system=True)),
    ("not-text", {"instruction": 7, "output": "a"}),
    ("encoding", chat(U | {"content": HALF}, A)),
    ("encoding", {"prompt": HALF, "completion": "a"}),
    ("encoding", chat(U, A, tools=[{HALF: 1}])),
    ("encoding", {"prompt": "q", "answer": HALF}),
    ("bad-train", chat(U, A | {"train": 1})),
    ("bad-train", chat(U | {"train": True}, A)),
    ("bad-train", {"prompt": [U, A | {"train": True}, U], "completion": [A]}),
    ("nothing-trained", chat(U, A | {"train": False})),
    ("nothing-trained", chat(U, A | {"weight": 0.0})),
    *(("bad-weight", chat(U, A | {"weight": weight})) for weight in (NAN, BIG, -1, True, "1", [1], float("inf"))),
    *(
        ("bad-margin", {"prompt": "q", "chosen": "a", "rejected": "b", "margin": m})
        for m in (NAN, BIG, True, "1", DEEP)
    ),
    *(("bad-label", {"prompt": "q", "completion": "a", "label": label}) for label in (1, "true", DEEP)),
    ("no-reply", {"messages": [U, A, U], "kto_tag": True}),
    ("no-reply", {"messages": [], "kto_tag": True}),
    ("empty-prompt", {"prompt": " "}),
    ("empty-prompt", {"prompt": []}),
    ("empty-prompt", {"instruction": "", "input": " ", "output": "a"}),
    ("no-question", {"prompt": [U, A]}),
    ("not-json", {"prompt": "q", "answer": NAN}),
    ("not-json", {"prompt": "q", "answer": b"bytes"}),
    ("not-json", {"prompt": "q", "answer": BIG}),
    ("too-deep", {"prompt": "q", "answer": DEEP}),
    ("two-systems", chat(S, U, A, system="another")),
    ("broken-tools", chat(U, A, tools="[{")),
    ("broken-tools", chat(U, A, tools={"name": "f"})),
    ("broken-tools", chat(U, A, tools=[7])),
    ("broken-tools", chat(U, A, tools=["{"])),
    ("broken-tools", chat(U, A, tools='[{"a": 1, "a": 2}]')),
    ("too-deep", chat(U, A, tools="[" * 100_000)),
    ("too-deep", chat(U, A, tools=[{"x": DEEP}])),
    ("not-json", chat(U, A, tools='[{"x": NaN}]')),
    ("bad-template-kwargs", chat(U, A, chat_template_kwargs=[1])),
    ("bad-template-kwargs", chat(U, A, chat_template_kwargs="{")),
    ("bad-template-kwargs", chat(U, A, chat_template_kwargs={"messages": []})),
    ("bad-template-kwargs", chat(U, A, chat_template_kwargs={"conversation": []})),
    ("bad-template-kwargs", chat(U, A, chat_template_kwargs={"chat_template": "{{ 1 }}"})),
    *(
        ("broken-tool-call", chat(U, A | {"tool_calls": calls}))
        for calls in (
            "f()",
            7,
            {"name": "f"},
            [None],
            ["f"],
            [{}],
            [{"function": "f"}],
            [{"name": ""}],
            [{"name": 7}],
            [{"name": "f", "arguments": '{"x": 1'}],
            [{"name": "f", "arguments": '{"x": 1} {'}],
        )
    ),
    ("broken-tool-call", {"conversations": [HUMAN, {"from": "function_call", "value": "f(1)"}]}),
    ("broken-tool-call", {"conversations": [HUMAN, {"from": "function_call", "value": None}]}),
    ("broken-tool-call", {"conversations": [HUMAN, {"from": "function_call", "value": "7"}]}),
    ("too-deep", chat(U, A | {"tool_calls": [{"name": "f", "arguments": '{"x":' * 100_000}]})),
    ("too-deep", chat(U, A | {"tool_calls": [{"name": "f", "arguments": {"x": DEEP}}]})),
    ("not-json", chat(U, A | {"tool_calls": [{"name": "f", "arguments": '{"x": NaN}'}]})),
    ("not-json", chat(U, A | {"tool_calls": [{"name": "f", "arguments": {"x": BIG}}]})),
]


@pytest.mark.parametrize(("kind", "row"), REFUSED)
def test_a_row_that_cannot_be_trained_is_refused(kind, row):
    assert refused(row) == kind


def test_a_template_that_a_row_brings_has_a_sentence_of_its_own():
    for value in ({"chat_template": "{{ 1 }}"}, '{"chat_template": "{{ 1 }}"}'):
        with pytest.raises(RowRefused, match="a row may not bring its own template; leave it out, and name"):
            read_template_kwargs(value)
    assert read_template_kwargs({"chat_template": None, "enable_thinking": True}) == {"enable_thinking": True}


SCALARS = st.sampled_from([None, True, 7, -1, NAN, BIG, "", "q", HALF, "{", "[]", '{"a": 1}', b"x", DEEP])
NAMES = sorted({name for group in COLUMNS.values() for name in group})
KEYS = [
    "role",
    "from",
    "content",
    "value",
    "tool_calls",
    "function",
    "name",
    "arguments",
    "train",
    "weight",
    "type",
    "text",
]
VALUES = st.recursive(
    SCALARS | st.sampled_from([U, A, GPT, HUMAN]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=8,
)


@given(
    st.sampled_from([kind for kind in ROW_KINDS if kind not in ("auto", "text")]),
    st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=5),
    st.booleans(),
)
def test_no_row_ends_in_an_error(kind, row, forced):
    refusal = None
    try:
        example = to_example(Format(kind, forced=forced), row, "f", 1)
    except RowRefused as error:
        refusal = error
    if refusal:
        assert "" not in (refusal.kind, refusal.reason)
        refusal.reason.encode()
    else:
        assert example.kind == kind
        for side in example.sides:
            json.dumps(asdict(side), allow_nan=False, ensure_ascii=False).encode()
        json.dumps(example.extra, allow_nan=False).encode()
