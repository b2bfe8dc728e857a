"""`kumi launch kubernetes` trains in pods, which are processes of this machine (`pods.py`): to the end, after a pod was
killed or drained, after a stop. Exit codes end the job or start a new pod."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from mini_slurm import MiniSlurm
from pod_process import Node
from pods import Cluster
from tests.hub import fake_hub
from tests.train.conftest import losses, run_file, write_documents

from forked import run_forked
from kumi.cli import main
from namespaces import enter_namespace, switched_namespaces

ADDRESSES = [f"10.77.0.{number}" for number in range(1, 15)]
STEPS = 60
APIS = ["job", "jobset"]
REST = pytest.mark.exhaustive
CANARY = "c4n4ry-of-a-secret"
SECRETS = {
    "HF_TOKEN": f"hf_{CANARY}",
    "WANDB_API_KEY": f"{CANARY}{'0' * 22}",
    "AWS_ACCESS_KEY_ID": f"AKIA{CANARY}",
    "AWS_SECRET_ACCESS_KEY": f"s3-{CANARY}",
}


def write_run(folder, shared, steps, api="job", save_time="60s", setup=(), time_limit=None, **changes):
    """Write run.toml in `folder` for a run of two nodes, whose data and run folder are below `shared` in the pods."""
    secrets = [] if api == "trainjob" else ["tokens"]
    kubernetes = {"image": "kumi", "api": api, "volumes": {str(shared): "team"}, "secrets": secrets}
    launch = {
        "kind": "kubernetes",
        "save_time": save_time,
        "setup": list(setup),
        "requeues": 2,
        "kubernetes": kubernetes,
    }
    launch |= {} if time_limit is None else {"time_limit": time_limit}
    options = {
        "cluster": {"nodes": 2, "devices_per_node": 2},
        "layout": {"dp_shard": 4, "zero": 3},
        "batch__tokens_per_step": 512,
        "data__sources": [{"path": f"{shared}/documents.jsonl"}],
        "data__cache": f"{shared}/tokens",
        "train__steps": steps,
        "train__out": f"{shared}/run",
        "checkpoint": {"every": 10, "keep": 2},
        "launch": launch,
        **changes,
    }
    return run_file(folder, **options)


@pytest.fixture(scope="module")
def networks():
    """Namespaces for the pods of a cluster, and the address of each."""
    with switched_namespaces(ADDRESSES) as names:
        yield list(zip(names, ADDRESSES))


@pytest.fixture
def cluster(networks, tmp_path, monkeypatch):
    """A cluster with the volume `team`, mounted at shared; its image has kumi, and kubectl of kumi talks to it."""
    for name in ("bin", "team", "shared", "pods"):
        (tmp_path / name).mkdir()
    install(tmp_path, f'exec {sys.executable} -m kumi "$@"')
    image = {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(Path(__file__).parents[2] / "src"),
        "KUMI_NUMERICS": "reference",
        "OMP_NUM_THREADS": "1",
    }
    node = Node(tmp_path / "pods", image, claims={"team": tmp_path / "team"}, secrets={"tokens": {}})
    monkeypatch.chdir(tmp_path)
    with Cluster(node, networks) as cluster:
        monkeypatch.setattr("kumi.launch.kubernetes.run_cluster_command", cluster.kubectl)
        yield cluster


def install(folder, program):
    """Let the shell lines `program` be kumi in the image."""
    file = folder / "bin" / "kumi"
    file.write_text(f"#!/bin/sh\n{program}\n")
    file.chmod(0o755)


def kumi(capsys, *words):
    """Run a command of kumi and return the object that it prints."""
    assert main([*words, "--json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def launch(cluster, capsys, folder, steps=STEPS, **changes):
    """Submit a run and return its Job or JobSet."""
    if not (folder / "team" / "documents.jsonl").exists():
        write_documents(folder / "team" / "documents.jsonl")
        write_run(folder, folder / "shared", steps, **changes)
    kumi(capsys, "launch", "run.toml", "--unchecked", "--submit")
    (workload,) = cluster.workloads.values()
    return workload


def command_lines():
    """The commands of all processes of this machine, which everybody can read."""
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            yield file.read_bytes().decode(errors="replace")


def files_with_canary(folder):
    """The files below `folder` whose name or content has a secret, byte by byte."""
    files = [file for file in folder.rglob("*") if file.is_file() and not file.is_symlink()]
    return [file for file in files if CANARY in file.name or CANARY.encode() in file.read_bytes()]


def trained_steps(folder):
    """The number of steps in the metrics so far."""
    file = folder / "team" / "run" / "metrics.jsonl"
    return file.read_text().count("train/loss") if file.exists() else 0


def train_here(folder):
    os.chdir(folder)
    raise SystemExit(main(["train", "run.toml", "cluster.nodes=1", "cluster.devices_per_node=4"]))


@pytest.fixture(scope="module")
def in_one_process(tmp_path_factory):
    """A function: number of steps -> the losses of the run in one process of four ranks, which nothing interrupts."""

    @cache
    def losses_of(steps):
        folder = tmp_path_factory.mktemp("uninterrupted")
        write_documents(folder / "documents.jsonl")
        write_run(folder, folder, steps)
        code, _, errors = run_forked(train_here, folder)
        assert code == 0, errors
        return losses(folder / "run")

    return losses_of


def give_secrets(cluster, folder):
    """Give the pods a Secret made from a file of mode 600, as `kubectl create secret --from-env-file`; the file."""
    file = folder / "secrets.env"
    file.write_text("".join(f"{name}={value}\n" for name, value in SECRETS.items()))
    file.chmod(0o600)
    cluster.node.secrets["tokens"] = dict(line.split("=") for line in file.read_text().splitlines())
    return file


def test_pods_train_as_one_process_and_write_no_secret(cluster, in_one_process, tmp_path, capsys):
    secrets = give_secrets(cluster, tmp_path)
    job = launch(cluster, capsys, tmp_path, steps=12)
    commands = set()
    cluster.wait_for(lambda: commands.update(command_lines()) or job.condition, pause=0.25)
    assert (job.condition, job.codes()) == ("Complete", [[0], [0]]), cluster.pods[0].log.read_text()
    assert losses(tmp_path / "team" / "run") == in_one_process(12)
    assert (tmp_path / "team" / "run" / "hf" / "README.md").exists()
    assert [command for command in commands if CANARY in command] == []
    assert files_with_canary(tmp_path) == [secrets]


S3 = """
import os, signal, sys
from pathlib import Path
from moto.server import ThreadedMotoServer
import boto3
server = ThreadedMotoServer(ip_address=sys.argv[1], port=0, verbose=False)
server.start()
url = f"http://{sys.argv[1]}:{server.get_host_and_port()[1]}"
client = boto3.client("s3", endpoint_url=url, region_name="us-east-1", **dict(zip(
    ("aws_access_key_id", "aws_secret_access_key"), sys.argv[3:])))
client.create_bucket(Bucket="bucket")
print(url, flush=True)
sys.stdin.read()
for entry in client.list_objects_v2(Bucket="bucket")["Contents"]:
    file = Path(sys.argv[2], entry["Key"])
    file.parent.mkdir(parents=True, exist_ok=True)
    client.download_file("bucket", entry["Key"], str(file))
"""


def serve_hub(namespace, address, folder):
    """A hub in `namespace`, which writes its URL to `folder` and at SIGTERM the files that it was given."""
    enter_namespace(namespace)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    fake_hub.TOKEN = SECRETS["HF_TOKEN"]
    with fake_hub.serve(address) as hub:
        (folder / "url").write_text(hub.url)
        signal.sigwait([signal.SIGTERM])
        for name, content in hub.repositories["org/small"].commits[hub.repositories["org/small"].sha("main")].items():
            (folder / name).write_bytes(content)


@pytest.fixture
def services(tmp_path):
    """A store of S3 and a hub in the cluster's network: their URLs, and a function that stops them and keeps what they
    have in the folders store and hub."""
    for package in ("moto", "s3fs"):
        pytest.importorskip(package, reason="needs a server of S3 (moto, 110 MB): pip install 'kumi[s3-check]'")
    for name in ("store", "hub"):
        (tmp_path / name).mkdir()
    with contextlib.ExitStack() as stack:

        def begin(namespace, address):
            words = [address, str(tmp_path / "store"), SECRETS["AWS_ACCESS_KEY_ID"], SECRETS["AWS_SECRET_ACCESS_KEY"]]
            command = ["nsenter", f"--net=/run/netns/{namespace}", sys.executable, "-c", S3, *words]
            store = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            hub = multiprocessing.get_context("fork").Process(
                target=serve_hub, args=(namespace, address, tmp_path / "hub")
            )
            hub.start()
            stack.callback(store.kill)
            stack.callback(hub.kill)

            def end():
                hub.terminate()
                hub.join()
                store.communicate()
                assert (hub.exitcode, store.returncode) == (0, 0)

            url = store.stdout.readline().strip()
            MiniSlurm.wait_for(lambda: (tmp_path / "hub" / "url").exists())
            return {"AWS_ENDPOINT_URL": url, "HF_ENDPOINT": (tmp_path / "hub" / "url").read_text()}, end

        yield begin


@pytest.mark.exhaustive
def test_a_run_that_uses_all_its_secrets_writes_none(cluster, services, tmp_path, capsys):
    """Checkpoints go to a store, the model and its card to a hub, and metrics to a tracker, if it is installed."""
    secrets = give_secrets(cluster, tmp_path)
    addresses, end = services(*next(cluster.networks))
    variables = {**addresses, "KUMI_CACHE": f"{tmp_path}/shared/cache", "HF_HUB_DISABLE_XET": "1"}
    tracker = "wandb" if find_spec("wandb") else "tensorboard"
    job = launch(
        cluster,
        capsys,
        tmp_path,
        setup=[f"export {name}={value}" for name, value in {**variables, "WANDB_MODE": "offline"}.items()],
        train__steps=12,
        train__out="s3://bucket/runs/small",
        export={"push": "org/small"},
        log={"every": 1, "trackers": [tracker]},
    )
    commands = set()
    cluster.wait_for(lambda: commands.update(command_lines()) or job.condition, pause=0.25)
    assert (job.condition, job.codes()) == ("Complete", [[0], [0]]), cluster.pods[0].log.read_text()
    end()
    assert (tmp_path / "store" / "runs" / "small" / "hf" / "model.safetensors").exists()
    assert (tmp_path / "hub" / "README.md").exists()
    assert list(tmp_path.rglob(f"{tracker}/*"))
    assert f"{tracker}: cannot" not in cluster.pods[0].log.read_text()
    assert [command for command in commands if CANARY in command and "moto" not in command] == []
    assert files_with_canary(tmp_path) == [secrets]


@pytest.mark.exhaustive
@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("index", [0, 1])
def test_a_killed_pod_is_replaced_and_the_run_goes_on(cluster, in_one_process, tmp_path, capsys, index, api):
    job = launch(cluster, capsys, tmp_path, api=api)
    cluster.wait_for(lambda: trained_steps(tmp_path) > 15)
    job.active[index].kill()
    cluster.wait_for(lambda: job.condition)
    ends = [[7, 0], [7, 0]]
    ends[index] = [137, 0]
    assert (job.condition[:8], job.codes()) == ("Complete", ends), [pod.log.read_text() for pod in cluster.pods]
    assert losses(tmp_path / "team" / "run") == in_one_process(STEPS)
    assert cluster.pods[0].address != cluster.pods[2].address


@pytest.mark.exhaustive
def test_the_containers_of_a_train_job_start_again_in_their_pods(cluster, in_one_process, tmp_path, capsys):
    jobs = launch(cluster, capsys, tmp_path, api="trainjob")
    cluster.wait_for(lambda: trained_steps(tmp_path) > 15)
    jobs.active[1].kill()
    cluster.wait_for(lambda: jobs.condition)
    assert (jobs.condition, jobs.codes()) == ("Completed", [[0], [0]]), [pod.log.read_text() for pod in cluster.pods]
    assert [pod.restarts for pod in cluster.pods] == [1, 1]
    assert losses(tmp_path / "team" / "run") == in_one_process(STEPS)


@pytest.mark.exhaustive
@pytest.mark.parametrize("index", [0, 1])
def test_a_drained_pod_saves_and_does_not_count(cluster, in_one_process, tmp_path, capsys, index):
    job = launch(cluster, capsys, tmp_path)
    cluster.wait_for(lambda: trained_steps(tmp_path) > 15)
    cluster.drain(job.active[index])
    cluster.wait_for(lambda: not job.active)
    steps = trained_steps(tmp_path)
    assert (tmp_path / "team" / "run" / "checkpoints" / f"step_{steps:06d}").exists()
    cluster.wait_for(lambda: job.condition)
    assert (job.condition, job.codes()) == ("Complete", [[143, 0], [143, 0]]), [p.log.read_text() for p in cluster.pods]
    assert job.counted == {}
    assert losses(tmp_path / "team" / "run") == in_one_process(STEPS)


@pytest.mark.exhaustive
def test_a_stopped_run_saves_and_goes_on_when_it_is_submitted_again(cluster, in_one_process, tmp_path, capsys):
    job = launch(cluster, capsys, tmp_path)
    cluster.wait_for(lambda: trained_steps(tmp_path) > 15)
    assert "its pods save and end" in kumi(capsys, "stop", "run.toml")["message"]
    cluster.wait_for(lambda: not job.active)
    assert (job.codes(), kumi(capsys, "status", "run.toml")["state"]) == ([[143], [143]], "suspended")
    again = launch(cluster, capsys, tmp_path)
    assert again is not job
    cluster.wait_for(lambda: again.condition)
    assert (again.condition, again.codes()) == ("Complete", [[0], [0]])
    again.complete.discard(0)  # as if pod 0 had been killed just before its end: pod 1 is never started again
    cluster.wait_for(lambda: again.condition)
    assert (again.condition, again.codes()) == ("Complete", [[0, 0], [0]])
    assert losses(tmp_path / "team" / "run") == in_one_process(STEPS)


@pytest.mark.exhaustive
def test_an_error_of_the_run_file_ends_the_job_at_once(cluster, tmp_path, capsys):
    job = launch(cluster, capsys, tmp_path, data__sources=[{"path": f"{tmp_path}/shared/missing.jsonl"}])
    cluster.wait_for(lambda: job.condition)
    assert (job.condition, job.reason, job.codes()) == ("Failed", "PodFailurePolicy", [[2], [2]])
    assert "missing.jsonl" in cluster.pods[1].log.read_text()


# Exit codes of the starts of pod 0 and of pod 1, a line each (none: sleep until SIGTERM, then 143), and the end: its
# condition, the reason, and how many pods each index had. requeues = 2.
ENDS = [
    ([[1, 7, 0], [0]], "Complete", "", [3, 1]),
    ([[75, 137, 0], [5, 8, 0]], "Complete", "", [3, 3]),
    ([[1, 7, 75, 0], []], "Failed", "MaxFailedIndexesExceeded", [3, 1]),
    ([[143, 143, 143, 143, 0], [0]], "Complete", "", [5, 1]),
    ([[], [2]], "Failed", "PodFailurePolicy", [1, 1]),
    *(pytest.param([[], [code]], "Failed", "PodFailurePolicy", [1, 1], marks=REST) for code in (3, 4, 6)),
]
PROGRAM = """
trap 'exit 143' TERM
code=$(sed -n "$(ls "$HOME"/../.. | grep -c -- "-$KUMI_NODE-0")p" {folder}/codes-$KUMI_NODE)
[ -n "$code" ] && exit $code
while :; do sleep 0.05; done
"""


def stand_in(folder, codes):
    """Let kumi in the image end with `codes`: of the starts of pod 0, and of pod 1."""
    install(folder, PROGRAM.format(folder=folder))
    for node, lines in enumerate(codes):
        (folder / f"codes-{node}").write_text("".join(f"{code}\n" for code in lines))


@pytest.mark.parametrize(("codes", "condition", "reason", "pods"), ENDS, ids=lambda item: str(item)[:30])
def test_exit_codes_end_the_job_or_start_a_new_pod(cluster, tmp_path, capsys, codes, condition, reason, pods):
    stand_in(tmp_path, codes)
    # A pod that is asked to end before its program listens ends with its grace period only.
    job = launch(cluster, capsys, tmp_path, save_time="5s")
    cluster.wait_for(lambda: job.condition)
    assert (job.condition, job.reason) == (condition, reason), job.codes()
    assert [len(each) for each in job.codes()] == pods


LOOK = """
until getent ahostsv4 "${KUMI_HEAD%:*}" > head; do sleep 0.05; done
# A pod that has ended has no address: wait for the other one.
touch "SHARED/looked-$KUMI_NODE"
until [ -e SHARED/looked-0 ] && [ -e SHARED/looked-1 ]; do sleep 0.05; done
cp "$2" run.toml
env -0 > variables
number=$(ls /proc | grep -c '^[0-9]')
for seen in "$$" "$(hostname)" "$(stat -f -c %T /dev/shm)" "$number" "$A"; do echo "$seen"; done > seen
"""


@pytest.mark.parametrize("api", [*APIS, "trainjob"])
def test_a_pod_has_the_command_variables_and_volumes_of_its_manifest(cluster, tmp_path, capsys, api):
    install(tmp_path, LOOK.replace("SHARED", str(tmp_path / "shared")))
    cluster.node.secrets["tokens"] = {"HF_TOKEN": "hf"}
    workload = launch(cluster, capsys, tmp_path, api=api, setup=["export A=$(echo one)"])
    cluster.wait_for(lambda: workload.condition)
    host = {"job": "small", "jobset": "small-node-0", "trainjob": "small-node-0"}[api]
    assert [pod.exit_code for pod in cluster.pods] == [0, 0], [pod.log.read_text() for pod in cluster.pods]
    for index, pod in enumerate(cluster.pods):
        home = pod.log.parent / "home"
        variables = dict(line.split("=", 1) for line in (home / "variables").read_text().split("\0") if line)
        port = 29500 if api == "trainjob" else 29400
        assert (variables["KUMI_NODE"], variables["KUMI_NODES"]) == (variables["JOB_COMPLETION_INDEX"], "2")
        assert (variables["KUMI_NODE"], variables["KUMI_HEAD"]) == (str(index), f"{host}-0.small:{port}")
        assert variables.get("HF_TOKEN") == (None if api == "trainjob" else "hf")
        assert (home / "head").read_text().split()[0] == ADDRESSES[0]
        assert (home / "run.toml").read_text() == (tmp_path / "run.toml").read_text()
        number, name, shm, processes, word = (home / "seen").read_text().split()
        assert (number, name, shm, word) == ("1", f"{host}-{index}", "tmpfs", "one")
        assert int(processes) < 9


@pytest.mark.parametrize(
    ("codes", "condition", "pods"),
    [
        ([[1, 7, 1, 0], [0, 0]], "Completed", [4, 2]),
        ([[], [2]], "Failed", [1, 1]),
        pytest.param([[1] * 9, []], "Failed", [9, 3], marks=REST),
    ],
)
def test_a_job_set_begins_anew_unless_its_job_failed_by_a_hopeless_code(
    cluster, tmp_path, capsys, codes, condition, pods
):
    stand_in(tmp_path, codes)
    jobs = launch(cluster, capsys, tmp_path, api="jobset")
    cluster.wait_for(lambda: jobs.condition)
    assert (jobs.condition, [len(each) for each in jobs.codes()]) == (condition, pods)


def test_the_time_limit_lets_the_pods_save_and_fails_the_job(cluster, tmp_path, capsys):
    stand_in(tmp_path, [[], []])
    job = launch(cluster, capsys, tmp_path, save_time="2s", time_limit="3s")
    cluster.wait_for(lambda: job.condition)
    assert (job.condition, job.reason, job.codes()) == ("Failed", "DeadlineExceeded", [[143], [143]])


def test_a_pod_that_ignores_the_request_to_end_is_killed_after_its_grace_period(cluster, tmp_path, capsys):
    install(tmp_path, "trap '' TERM; while :; do sleep 0.05; done")
    job = launch(cluster, capsys, tmp_path, save_time="1s")
    cluster.wait_for(lambda: len(job.active) == 2)
    kumi(capsys, "stop", "run.toml")
    cluster.wait_for(lambda: not job.active)
    assert (job.condition, job.codes()) == ("Suspended", [[137], [137]])
