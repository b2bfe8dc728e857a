"""`kumi launch`, `status`, `stop` and `logs` with programs that stand for sbatch, kubectl, sky and ssh."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from kumi.cli import main
from kumi.launch import slurm

CANARY = "c4n4ry-of-a-secret"
RUN = """
name = "tiny run"
[model]
init = "random"
config = { model_type = "llama", architectures = ["LlamaForCausalLM"], vocab_size = 300, hidden_size = 32, \
intermediate_size = 64, num_hidden_layers = 1, num_attention_heads = 2, num_key_value_heads = 2, rms_norm_eps = 1e-5, \
max_position_embeddings = 64 }
[cluster]
source = "h100-sxm"
nodes = 2
network = "ib-ndr"
[batch]
seq_len = 64
tokens_per_step = 4096
[layout]
dp_shard = 16
[data]
tokenizer = { vocab_size = 300 }
sources = [{ path = "texts/*.jsonl" }]
[train]
steps = 10
out = "runs/tiny"
[launch]
time_limit = "1h"
"""
STAND_IN = """#!{python}
import json, os, sys
from pathlib import Path
name, folder = Path(sys.argv[0]).name, Path({folder!r})
with open(folder / "calls.jsonl", "a") as calls:
    print(json.dumps([name, *sys.argv[1:]]), file=calls)
answers = json.loads((folder / "answers.json").read_text())
key = " ".join([name, *sys.argv[1:3]])
answer = next((answers[known] for known in answers if key.startswith(known)), "")
if answer is None:
    print(f"{{name}}: no such thing", file=sys.stderr)
    sys.exit(1)
print(answer)
"""


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Put stand-ins on PATH; return a function that sets their answers (None: they fail) and one that reads calls."""
    folder = tmp_path / "programs"
    folder.mkdir()
    for name in ("sbatch", "scontrol", "scancel", "kubectl", "sky"):
        (folder / name).write_text(STAND_IN.format(python=sys.executable, folder=str(folder)))
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("HF_TOKEN", CANARY)
    monkeypatch.setenv("WANDB_PROJECT", "a project")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(RUN)

    def answer(**answers):
        (folder / "answers.json").write_text(
            json.dumps({key.replace("_", " "): value for key, value in answers.items()})
        )

    def calls():
        file = folder / "calls.jsonl"
        lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        file.unlink(missing_ok=True)
        return lines

    answer()
    yield answer, calls
    secret = [file for file in tmp_path.rglob("*") if file.is_file() and CANARY.encode() in file.read_bytes()]
    assert [file for file in secret if file.name != "secrets.env"] == []


def kumi(capsys, *words, code=0):
    assert main(list(words)) == code, capsys.readouterr().err
    return capsys.readouterr()


def test_by_default_the_file_is_printed_and_nothing_is_written_or_submitted(programs, tmp_path, capsys):
    _, calls = programs
    before = sorted(tmp_path.rglob("*"))
    printed = kumi(capsys, "launch", "slurm", "run.toml", "train.steps=20")
    assert printed.out.startswith("#!/bin/bash\n")
    assert "-m kumi train run.toml train.steps=20 &\n" in printed.out
    assert "#SBATCH --gpus-per-node=8\n" in printed.out
    assert "layout     dp_shard=16" in printed.err
    assert "nothing was submitted" in printed.err
    assert (calls(), sorted(tmp_path.rglob("*"))) == ([], before)


def test_the_run_file_may_name_the_launcher(programs, capsys):
    printed = kumi(capsys, "launch", "run.toml", "launch.kind=kubernetes", "train.out=s3://b/tiny")
    assert yaml.safe_load_all(printed.out)
    assert main(["launch", "run.toml"]) == 2
    assert "launch.kind is unset" in capsys.readouterr().err
    assert main(["launch", "slum", "run.toml"]) == 2
    assert "'slum' is not a launcher; use slurm, kubernetes, skypilot, ssh" in capsys.readouterr().err


def test_a_written_file_is_not_overwritten_once_it_is_edited(programs, tmp_path, capsys):
    assert "wrote " in kumi(capsys, "launch", "slurm", "run.toml", "--out", "jobs").out
    file = tmp_path / "jobs" / "job.sbatch"
    kumi(capsys, "launch", "slurm", "run.toml", "--out", "jobs")
    file.write_text(file.read_text() + "# mine\n")
    assert main(["launch", "slurm", "run.toml", "--out", "jobs"]) == 2
    assert "has other text than kumi would write, and is not overwritten" in capsys.readouterr().err
    assert file.read_text().endswith("# mine\n")


def test_what_does_not_fit_is_refused_before_the_queue(programs, capsys):
    _, calls = programs
    assert main(["launch", "slurm", "run.toml", "layout.dp_shard=3", "--submit"]) == 2
    assert "LayoutError" in capsys.readouterr().err
    kumi(
        capsys, "launch", "slurm", "run.toml", "model.config={}", "model.source=/on/the/cluster", "--unchecked", code=2
    )
    assert calls() == []


def test_slurm(programs, tmp_path, capsys):
    answer, calls = programs
    answer(sbatch="77;cluster", scontrol_show="", scontrol="JobId=77 JobState=RUNNING Restarts=2 NodeList=n[0-1]")
    words = ["run.toml", "launch.env=['WANDB_PROJECT']"]
    described = json.loads(kumi(capsys, "launch", "slurm", *words, "--submit", "--json").out)
    file = tmp_path / "runs" / "tiny" / "launch" / "job.sbatch"
    assert (described["id"], described["folder"]) == ("77", str(file.parent))
    assert described["files"] == {"job.sbatch": file.read_text()}
    assert ",WANDB_PROJECT\n" in file.read_text()
    assert calls() == [["sbatch", "--parsable", str(file)]]
    answer(scontrol="JobId=77 JobState=RUNNING Restarts=2 NodeList=n[0-1] RunTime=01:00 TimeLimit=02:00")
    status = json.loads(kumi(capsys, "status", *words, "--json").out)
    assert (status["state"], status["step"], status["max_steps"]) == ("running", 0, 10)
    assert "restarted 2 times, on n[0-1] for 01:00 of 02:00" in status["detail"]
    assert "progress   step 0 of 10" in kumi(capsys, "status", *words).out
    calls()
    kumi(capsys, "stop", *words)
    assert (tmp_path / "runs" / "tiny" / "stop").read_text() == "stop\n"
    assert ["scontrol", "update", "JobId=77", "Requeue=0"] in calls()
    kumi(capsys, "stop", *words, "--now")
    assert calls() == [["scancel", "77"]]
    assert main(["logs", *words]) == 2
    assert "Slurm job 77 has no output yet" in capsys.readouterr().err
    (file.parent / "slurm-77.out").write_text("first\nlast\n")
    assert json.loads(kumi(capsys, "logs", *words, "--lines", "1", "--json").out)["lines"] == ["last"]


HOSTILE = [
    'it\'s "so" $(touch pwned) `touch pwned` ${HOME}',
    "'; touch pwned; '\"; touch pwned; \"",
    "my run  x",
    "--wrap=touch pwned",
    "a & touch pwned | touch pwned # b",
]


@pytest.mark.parametrize(
    "text", [*HOSTILE[:2], *(pytest.param(text, marks=pytest.mark.exhaustive) for text in HOSTILE[2:])]
)
def test_no_shell_of_this_machine_sees_names_paths_and_options(programs, tmp_path, monkeypatch, capsys, text):
    """All verbs, with a run, a run file, a folder and options of sbatch that a shell would run."""
    answer, calls = programs
    started = []

    class Recorded(subprocess.Popen):
        def __init__(self, command, *rest, **options):
            started.append(command)
            assert not options.get("shell")
            assert not isinstance(command, str)
            super().__init__(command, *rest, **options)

    monkeypatch.setattr(subprocess, "Popen", Recorded)
    monkeypatch.setattr(os, "system", None)
    (tmp_path / text).mkdir()
    monkeypatch.chdir(tmp_path / text)
    run_file = f"{text}.toml"
    Path(run_file).write_text(RUN)
    extra = [f"--comment={text}", text]
    words = [f"./{run_file}", f"name={json.dumps(text)}", f"train.out={json.dumps(f'runs/{text}')}"]
    words += [f"launch.slurm.extra={json.dumps(extra)}"]
    answer(sbatch="77", scontrol="JobId=77 JobState=RUNNING")
    described = json.loads(kumi(capsys, "launch", "slurm", *words, "--submit", "--json").out)
    file = tmp_path / text / "runs" / text / "launch" / "job.sbatch"
    assert calls() == [["sbatch", "--parsable", str(file)]]
    assert described["files"]["job.sbatch"].splitlines().count(f"#SBATCH --comment={text}") == 1
    assert described["files"]["job.sbatch"].splitlines().count(f"#SBATCH {text}") == 1
    (file.parent / "slurm-77.out").write_text("trained\n")
    for verb in ("status", "logs", "stop"):
        kumi(capsys, verb, *words)
    assert {call[0] for call in calls()} == {"scontrol", "scancel"}
    assert {Path(command[0]).name for command in started} == {"sbatch", "scontrol", "scancel", "tail"}
    assert list(tmp_path.rglob("pwned")) == []


def test_slurm_gets_no_secret_by_name(programs, capsys):
    assert main(["launch", "slurm", "run.toml", "launch.env=['HF_TOKEN']", "--submit"]) == 2
    assert "launch.env names HF_TOKEN, and Slurm would store the value" in capsys.readouterr().err
    assert programs[1]() == []


def test_kubernetes(programs, tmp_path, capsys):
    answer, calls = programs
    words = ["run.toml", "launch.kubernetes.namespace=research"]
    assert main(["launch", "kubernetes", *words]) == 2
    assert "train.out='runs/tiny' is in no folder of launch.kubernetes.volumes (none)" in capsys.readouterr().err
    words += ["train.out=/runs/tiny", "launch.kubernetes.volumes={'/runs'='claim'}"]
    assert main(["launch", "kubernetes", *words, "--submit"]) == 2
    assert "REPLACE-WITH-IMAGE must be replaced before kumi can submit it" in capsys.readouterr().err
    assert "replace REPLACE-WITH-IMAGE before" in kumi(capsys, "launch", "kubernetes", *words).err
    assert calls() == []
    words += ["launch.kubernetes.image=registry/kumi:1"]
    answer(kubectl_get=None)
    name = json.loads(kumi(capsys, "launch", "kubernetes", *words, "--submit", "--json").out)["id"]
    label = name.removeprefix("job.research.")
    file = tmp_path / "launch" / "tiny" / "manifest.yaml"
    get = ["kubectl", "get", "job", label, "--namespace=research", "-o", "json"]
    assert label.startswith("tiny-run-")
    assert calls() == [get, ["kubectl", "apply", "-f", str(file)]]
    answer(kubectl_get=json.dumps({"status": {"active": 2, "ready": 1}}))
    assert "state      running: 1 of 2 pods ready, 0 failed so far" in kumi(capsys, "status", *words).out
    assert main(["launch", "kubernetes", *words, "--submit"]) == 2
    assert "is running; stop it with kumi stop" in capsys.readouterr().err
    calls()
    kumi(capsys, "stop", *words)
    assert calls() == [
        ["kubectl", "patch", "job", label, "--namespace=research", "--type=merge", "-p", '{"spec":{"suspend":true}}']
    ]
    done = {"status": {"conditions": [{"type": "Failed", "status": "True", "reason": "PodFailurePolicy"}]}}
    answer(kubectl_get=json.dumps(done))
    assert "state      failed: PodFailurePolicy" in kumi(capsys, "status", *words).out
    calls()
    kumi(capsys, "launch", "kubernetes", *words, "--submit")
    assert ["kubectl", "delete", "job", label, "--namespace=research", "--wait=true"] in calls()
    json.loads(kumi(capsys, "logs", *words, "--json").out)
    selector = f"job-name={label},batch.kubernetes.io/job-completion-index=0"
    assert calls() == [["kubectl", "logs", "-l", selector, "--tail=50", "--namespace=research"]]


def test_skypilot(programs, tmp_path, capsys):
    answer, calls = programs
    secrets = tmp_path / "secrets.env"
    secrets.write_text(f"WANDB_API_KEY={CANARY}\n")
    secrets.chmod(0o640)
    words = ["run.toml", "train.out=/runs/x", "launch.env=['HF_TOKEN']", f"launch.env_file={secrets}"]
    words += ["launch.skypilot.mounts={'/runs'='s3://b'}"]
    assert main(["launch", "skypilot", *words, "--submit"]) == 2
    assert "secrets.env has mode 640" in capsys.readouterr().err
    secrets.chmod(0o600)
    printed = kumi(capsys, "launch", "skypilot", *words, "--submit")
    assert CANARY not in printed.out + printed.err
    file = str(tmp_path / "launch" / "x" / "task.yaml")
    given = ["--secret", "HF_TOKEN", "--secret-file", str(secrets)]
    assert calls() == [["sky", "jobs", "launch", "--yes", "--detach-run", *given, file]]
    label = yaml.safe_load(Path(file).read_text())["name"]
    jobs = [
        {"job_name": label, "job_id": number, "status": state} for number, state in ((3, "FAILED"), (12, "RUNNING"))
    ]
    answer(sky_jobs=json.dumps(jobs))
    assert "state      running: recovered 0 times" in kumi(capsys, "status", *words).out
    assert main(["stop", *words]) == 2
    assert "SkyPilot cannot ask a job to save" in capsys.readouterr().err
    calls()
    kumi(capsys, "stop", *words, "--now")
    kumi(capsys, "logs", *words, "--lines", "7", "--json")
    assert calls() == [
        ["sky", "jobs", "cancel", "--yes", "--name", label],
        ["sky", "jobs", "logs", "--name", label, "--tail", "7", "--no-follow"],
    ]


def test_a_run_that_was_not_launched_has_no_state(programs, capsys):
    for verb in ("status", "stop", "logs"):
        assert main([verb, "run.toml"]) == 2
        assert "kumi has submitted no job of this run (looked in " in capsys.readouterr().err
        assert main([verb, "run.toml", "launch.kind=slurm"]) == 2
        assert "launch.json does not exist, so kumi has submitted no job of this run" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"kind": "slurm"}', '{"kind": "slurm", "id": "--user=x", "submitted": ""}']
)
def test_a_record_of_someone_else_cannot_give_options(programs, tmp_path, capsys, text):
    _, calls = programs
    folder = tmp_path / "runs" / "tiny" / "launch"
    folder.mkdir(parents=True)
    (folder / "launch.json").write_text(text)
    assert main(["stop", "run.toml", "--now"]) == 2
    assert "launch.json is damaged" in capsys.readouterr().err
    assert calls() == []


def test_a_missing_program_is_named(programs, monkeypatch, capsys):
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["launch", "slurm", "run.toml", "--submit"]) == 2
    assert "sbatch is not installed here" in capsys.readouterr().err


def test_help_needs_no_torch():
    program = "import sys; from kumi.cli import main; main(['launch', 'slurm', 'run.toml', '--unchecked']); "
    program += "assert 'torch' not in sys.modules"
    assert slurm.name == "slurm"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
