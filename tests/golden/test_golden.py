"""Tests of golden.py: facts, measured values, sentences and differences."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from golden_cases import PARTS, Case

import golden


@pytest.fixture
def record(tmp_path):
    """`record(program)`: the recording of a fake kumi whose main program is `program`."""
    package = tmp_path / "src" / "kumi"
    package.mkdir(parents=True)
    work = tmp_path / "work"
    work.mkdir()

    def run(program: str, *folders: str, digests: tuple[str, ...] = ()):
        (package / "__init__.py").write_text("")
        (package / "__main__.py").write_text(program)
        return golden.Runner(work, tmp_path / "src")(Case("a case", ("verb", "{work}/x"), folders, digests))

    return run


def test_sentences_are_apart_from_facts_and_the_folder_counts_as_neither(record):
    recorded = record(
        "import json, sys; print(json.dumps({'a': [1, 'code'], 'b': {'said': 'in words ' + sys.argv[2]}}))"
    )
    assert recorded["facts"] == {"exit": 0, "output.a.0": 1, "output.a.1": "code"}
    assert recorded["sentences"] == {"output.b.said": "in words {work}/x"}


def test_what_is_measured_is_there_but_has_no_value(record):
    recorded = record(
        "import json; print(json.dumps({'perf/step_s': 1.5, 'perf/estimated_step_s': 2.5, 'time/data_s': 3}))"
    )
    measured = {"output.perf/step_s": "<float>", "output.time/data_s": "<int>"}
    assert recorded["facts"] == {"exit": 0, "output.perf/estimated_step_s": 2.5, **measured}


def test_a_refusal_is_its_exit_code_and_its_last_line(record):
    recorded = record(
        "import sys; print('first', file=sys.stderr); print('Error: no such key', file=sys.stderr); sys.exit(2)"
    )
    assert recorded["facts"]["exit"] == 2
    assert recorded["sentences"] == {"error": "Error: no such key"}


def test_files_count_by_name_or_by_their_bytes_in_any_folder(record):
    program = (
        "from pathlib import Path; p = Path('out/hf'); p.mkdir(parents=True); (p / 'w').write_text(str(Path.cwd()))"
    )
    recorded = record(program + "; Path('out/log').write_text('x')", "out", digests=("hf",))
    assert recorded["facts"]["file log"] == "present"
    assert recorded["facts"]["file hf/w"] == golden.hashlib.sha256(b"{work}").hexdigest()


def test_a_fact_that_changes_is_named_and_a_sentence_is_not(capsys):
    before = {"a": {"facts": {"loss": 1.0, "exit": 0}, "sentences": {"said": "one"}}}
    after = {"a": {"facts": {"loss": 1.5, "exit": 0}, "sentences": {"said": "two"}}}
    assert golden.report(before, before) == 0
    assert golden.report(before, after) == 1
    assert "a: loss: 1.0 -> 1.5" in capsys.readouterr().out
    assert golden.report(after, after | {"b": after["a"]}) == 1
    assert golden.differences(before, after, "sentences") == ["a: said: 'one' -> 'two'"]


def test_every_case_has_a_name_of_its_own():
    names = [case.name for part in PARTS.values() for case in part()]
    assert len(set(names)) == len(names)
    assert len(PARTS["plans"]()) == 300
