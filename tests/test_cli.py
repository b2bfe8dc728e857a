"""The command line as users type it: verbs and flags are frozen, help answers, exit codes are as documented."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kumi import errors
from kumi.cli import _parser, main

ROOT = Path(__file__).parents[1]
QUICKSTART = str(ROOT / "examples" / "quickstart.toml")


def flags(parser):
    return sorted(option for action in parser._actions for option in action.option_strings)


def test_verbs_and_flags_are_frozen():
    verbs = next(action for action in _parser()._actions if action.choices).choices
    assert {name: flags(verb) for name, verb in verbs.items()} == {
        "init": ["--help", "--json", "--list", "--out", "-h"],
        "describe": ["--help", "--json", "--resolved", "--schema", "-h"],
        "plan": [
            "--batch-size",
            "--brief",
            "--calibrate",
            "--context",
            "--days",
            "--engine",
            "--explain",
            "--export",
            "--gpus",
            "--help",
            "--html",
            "--inference",
            "--json",
            "--out",
            "--prompt-tokens",
            "--prompts",
            "--reply-p99",
            "--reply-tokens",
            "--save",
            "--svg",
            "--tokens",
            "--top",
            "--trace",
            "--trainable",
            "-h",
        ],
        "data": [
            "--against",
            "--diff",
            "--first",
            "--help",
            "--json",
            "--near",
            "--source",
            "--validation",
            "--write",
            "-h",
        ],
        "train": [
            "--allow-change",
            "--dry-run",
            "--end-with-stdin",
            "--head",
            "--help",
            "--json",
            "--node",
            "--nodes",
            "--rank",
            "-h",
        ],
        "doctor": ["--device", "--gpu", "--head", "--help", "--json", "--node", "--nodes", "--out", "--wait", "-h"],
        "launch": ["--help", "--json", "--out", "--submit", "--unchecked", "-h"],
        "status": ["--help", "--json", "-h"],
        "stop": ["--help", "--json", "--now", "-h"],
        "logs": ["--follow", "--help", "--json", "--lines", "-h"],
        "generate": [
            "--base",
            "--batch-size",
            "--checkpoint",
            "--dtype",
            "--help",
            "--json",
            "--max-new-tokens",
            "--min-p",
            "--no-chat-template",
            "--num-return-sequences",
            "--out",
            "--prompt",
            "--prompts",
            "--seed",
            "--stop",
            "--system",
            "--temperature",
            "--top-k",
            "--top-p",
            "-h",
        ],
        "eval": [
            "--apply-chat-template",
            "--base",
            "--checkpoint",
            "--data",
            "--dtype",
            "--help",
            "--include-path",
            "--json",
            "--layout",
            "--limit",
            "--lm-eval",
            "--max-length",
            "--num-fewshot",
            "--out",
            "--tasks",
            "--text-key",
            "--trust-task-code",
            "--write-card",
            "-h",
        ],
        "convert": [
            "--base",
            "--checkpoint",
            "--config",
            "--critic",
            "--dtype",
            "--help",
            "--json",
            "--layout",
            "--llama-cpp",
            "--megatron-local",
            "--megatron-vocab",
            "--outtype",
            "--public",
            "--push",
            "--to",
            "--unverified",
            "--verify",
            "-h",
        ],
        "vocab": [
            "--add",
            "--data",
            "--help",
            "--init",
            "--json",
            "--learn",
            "--pad-to-multiple-of",
            "--special",
            "--text-key",
            "--verify",
            "-h",
        ],
        "push": ["--help", "--json", "--public", "--unverified", "-h"],
        "bench": ["--help", "--json", "--out", "--quick", "--ranks", "-h"],
    }


def test_config_keys_are_frozen():
    """Renaming or removing a key breaks run files: change this list only together with the changelog."""
    schema = json.loads(
        subprocess.run(
            [sys.executable, "-m", "kumi", "describe", "--schema"], check=True, capture_output=True, text=True
        ).stdout
    )
    keys = {name: sorted(section["properties"]) for name, section in schema["$defs"].items()}
    frozen = json.loads((Path(__file__).parent / "config_keys.json").read_text())
    assert keys == frozen


@pytest.mark.parametrize(
    "verb",
    [
        "init",
        "describe",
        "plan",
        "data",
        "doctor",
        "train",
        "launch",
        "status",
        "stop",
        "logs",
        "generate",
        "eval",
        "convert",
        "vocab",
        "push",
        "bench",
    ],
)
def test_every_verb_has_help_with_an_example(verb, capsys):
    with pytest.raises(SystemExit) as ended:
        main([verb, "--help"])
    assert ended.value.code == 0
    assert "Example: kumi" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [["trian"], ["train"], ["train", "x.toml", "--allow", "y"], ["describe", "--js"], ["bench", "--ranks", "0"]],
)
def test_wrong_usage_is_exit_code_2(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert "usage: kumi" in capsys.readouterr().err


@pytest.mark.parametrize("module", ["kumi", "kumi.cli"])
def test_kumi_alone_prints_help(module):
    ended = subprocess.run([sys.executable, "-m", module], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith("usage: kumi")
    assert "plan " in ended.stdout


def test_describe_as_json(capsys):
    assert main(["describe", QUICKSTART, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["layout"]["dp_replicate"] == 2
    assert 5e6 < printed["model"]["parameters"] < 10e6
    assert printed["memory"]["total"] == sum(size for kind, size in printed["memory"].items() if kind != "total")


def test_describe_resolved_is_a_run_file(capsys, tmp_path):
    assert main(["describe", QUICKSTART, "--resolved"]) == 0
    (tmp_path / "run.toml").write_text(capsys.readouterr().out)
    assert main(["describe", str(tmp_path / "run.toml"), "--resolved"]) == 0
    assert capsys.readouterr().out == (tmp_path / "run.toml").read_text()


def test_describe_without_a_run_file_says_what_to_do(capsys):
    assert main(["describe"]) == 2
    assert "no run file is given; name one" in capsys.readouterr().err


def test_a_closed_pipe_is_no_error():
    program = f"{sys.executable} -m kumi describe --schema | head -n 1"
    ended = subprocess.run(["bash", "-o", "pipefail", "-c", program], capture_output=True, text=True)
    assert (ended.stdout, ended.stderr) == ("{\n", "")


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (KeyboardInterrupt(), 130, "interrupted; finished work is kept"),
        (PermissionError(13, "Permission denied", "runs/x"), 2, "PermissionError: runs/x: Permission denied; make it"),
        (OSError("No usable temporary directory"), 2, "OSError: No usable temporary directory; make it usable"),
    ],
)
def test_what_the_system_refuses_is_one_sentence(error, code, words, monkeypatch, capsys):
    def fail(path, overrides):
        raise error

    monkeypatch.setattr("kumi.config.load", fail)
    assert main(["train", "run.toml"]) == code
    assert capsys.readouterr().err.startswith(words)


def test_what_keeps_nothing_does_not_promise_to_go_on(monkeypatch, capsys):
    def interrupt(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("kumi.cli.plan._plan", interrupt)
    assert main(["plan", "run.toml"]) == errors.INTERRUPTED
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize("redirection", [">&-", "2>&-", "| true", "> /dev/null"])
def test_output_that_nobody_can_read_stops_nothing(redirection):
    program = (
        "import sys, kumi.cli as cli\n"
        "cli._run = lambda arguments: [print('é', chr(0x2603), flush=True) for _ in range(2000)] and 7\n"
        "sys.exit(cli.main())"
    )
    line = f'PYTHONUTF8=0 PYTHONIOENCODING=ascii {sys.executable} -c "$0" describe {redirection}'
    ended = subprocess.run(["bash", "-o", "pipefail", "-c", line, program], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (7, "")


def test_every_error_kind_has_a_documented_exit_code():
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.KumiError)]
    documented = {int(code) for code in re.findall(r"^\| (\d+) \|", (ROOT / "docs" / "running.md").read_text(), re.M)}
    assert {kind.exit_code for kind in kinds} <= documented
    assert {errors.OK, errors.REQUEUE, errors.INTERRUPTED, errors.TERMINATED} <= documented
