"""Runs whose train.out is a URL of a real server of S3: killed, resumed elsewhere, through failures, exported."""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
from tests.remote.faulty_proxy import FAULTS, FaultyProxy
from tests.train.conftest import losses, run_file, write_documents
from tests.train.test_failing_ranks import command

from kumi.cli import main
from kumi.config import load
from kumi.errors import ConfigError
from kumi.remote.cache_folder import local_run_folder
from kumi.remote.remote_store import open_store
from kumi.storage import checkpoint
from kumi.storage.remote_checkpoints import complete_steps
from kumi.train.remote_run import check_shared_folder

WIDE = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 256,
    "rms_norm_eps": 1e-5,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


def run_of(folder, out, steps=9, **changes):
    """A run of two ranks that share the states, whose data is beside it."""
    folder.mkdir(exist_ok=True)
    if not (folder / "documents.jsonl").exists():
        write_documents(folder / "documents.jsonl")
    options = {"checkpoint": {"every": 3, "keep": 2, "upload_timeout_s": 60.0}, **changes}
    return run_file(
        folder,
        model__config=WIDE,
        cluster__devices_per_node=2,
        layout={"zero": 3},
        train__steps=steps,
        train__out=out,
        **options,
    )


def train(folder, *arguments):
    with contextlib.chdir(folder):
        return main(["train", "run.toml", *arguments])


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The losses of the run without a store and without a kill."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    run_of(folder, "run")
    assert train(folder) == 0
    return losses(folder / "run")


def steps_on(url):
    with open_store(url) as store:
        return complete_steps(store)


def test_a_run_on_any_file_system(tmp_path, cache, uninterrupted, capfd):
    url = f"file://{tmp_path}/store/run"
    run_of(tmp_path / "a", url)
    assert train(tmp_path / "a") == 0
    output = capfd.readouterr().out
    assert f"store      {url}, written in {local_run_folder(url)}" in output
    assert "disk       at most 4 checkpoints of" in output
    assert f"uploaded   {url}" in output
    store = tmp_path / "store" / "run"
    assert losses(store) == uninterrupted
    assert steps_on(url)[-1] == 9
    checkpoint.open(store / "checkpoints" / "step_000009").verify()
    assert (store / "hf" / "model.safetensors").read_bytes() == (
        local_run_folder(url) / "hf" / "model.safetensors"
    ).read_bytes()
    assert (store / "tokenizer" / "tokenizer.json").is_file()
    assert not (store / "data").exists()
    # A machine without the local folder exports again, and trains on.
    shutil.rmtree(cache)
    assert train(tmp_path / "a") == 0
    assert "already finished: 9 steps" in capfd.readouterr().out
    shutil.rmtree(cache)
    assert (
        train(
            tmp_path / "a",
            "train.steps=11",
            "--allow-change",
            "train.steps",
            "optim.schedule=constant",
            "--allow-change",
            "optim.schedule",
        )
        == 0
    )
    assert "resumed after step 9" in capfd.readouterr().out
    assert sorted(losses(store)) == list(range(1, 12))


def test_killed_and_resumed_on_another_machine(tmp_path, bucket, cache, uninterrupted, s3_port, monkeypatch):
    """Kill -9 of all processes at random moments, each start with an empty cache; the losses are bit-equal. Every file
    of a checkpoint is sent once."""
    url = f"{bucket}/runs/x"
    proxy = FaultyProxy(s3_port)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    folder, draw = tmp_path / "a", random.Random(4)
    run_of(folder, url)
    for _ in range(2):
        before = steps_on(url)
        pid = command(folder, None, "two", folder / "output.txt")
        until = time.monotonic() + 120
        while steps_on(url) in (before, []) and time.monotonic() < until:
            time.sleep(draw.uniform(0.05, 0.3))
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        assert steps_on(url), (folder / "output.txt").read_text()
        shutil.rmtree(cache)
    before = len(proxy.requests)
    assert train(folder) == 0
    assert steps_on(url)[-1] == 9
    assert losses(local_run_folder(url)) == uninterrupted
    sent = [path.partition("?")[0] for method, path in proxy.requests[before:] if method == "PUT" and "shard_" in path]
    assert sorted(path.rpartition("/")[2] for path in sent if "step_000009" in path) in (
        ["shard_00000.safetensors", "shard_00001.safetensors"],
        [],  # the kill came after the last checkpoint
    )
    assert len(set(sent)) == len(sent)
    # The export is usable from the store, and has the model of the checkpoint.
    assert main(["convert", f"{url}/checkpoints/step_000009", f"{bucket}/models/m", "--to", "hf", "--verify"]) == 0
    shutil.rmtree(cache)
    assert main(["generate", f"{bucket}/models/m", "--prompt", "the model", "--max-new-tokens", "3"]) == 0
    assert main(["generate", url, "--prompt", "the model", "--max-new-tokens", "3"]) == 0
    proxy.stop()


def test_twenty_failures_during_a_run_are_survived(tmp_path, bucket, cache, uninterrupted, s3_port, monkeypatch, capfd):
    draw, kinds = random.Random(1), [fault for fault in FAULTS for _ in range(4)][:20]
    draw.shuffle(kinds)
    proxy = FaultyProxy(s3_port, lambda number, method, path: kinds.pop() if kinds and draw.random() < 0.25 else None)
    proxy.silence = 1.5
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    monkeypatch.setenv("KUMI_STORE_TIMEOUT", "1")
    url = f"{bucket}/runs/x"
    run_of(tmp_path / "a", url)
    assert train(tmp_path / "a") == 0, capfd.readouterr().err
    assert losses(local_run_folder(url)) == uninterrupted
    shutil.rmtree(cache)
    while kinds:  # downloads, and the uploads of the export
        assert train(tmp_path / "a") == 0, capfd.readouterr().err
        shutil.rmtree(cache)
    assert len(proxy.injected) == 20
    with open_store(url) as store:
        assert complete_steps(store)[-1] == 9
    proxy.stop()


def test_training_goes_on_without_the_store_and_the_next_start_uploads(
    tmp_path, bucket, cache, uninterrupted, s3_port, monkeypatch, capfd
):
    """The store refuses all checkpoints. The run ends with one sentence and exit code 8, and the disk is bounded."""
    proxy = FaultyProxy(
        s3_port, lambda number, method, path: "500" if "/checkpoints/" in path and method == "PUT" else None
    )
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    url = f"{bucket}/runs/x"
    run_of(tmp_path / "a", url, checkpoint={"every": 1, "keep": 2, "upload_timeout_s": 2.0})
    assert train(tmp_path / "a") == 8
    output = capfd.readouterr()
    assert len(re.findall(r"^upload     .*training goes on", output.err, re.M)) <= 1
    assert re.search(
        r"SaveError: s3://.*the store failed 6 times in a row .*everything is in .*run the same command again",
        output.err,
    )
    out = local_run_folder(url)
    assert losses(out) == uninterrupted
    files = {path.stat().st_ino for path in out.parent.rglob("shard_*.safetensors")}
    assert len(files) <= 2 * 3, "two checkpoints, and the one whose upload was tried"
    assert steps_on(url) == []
    proxy.choose = lambda number, method, path: None
    assert train(tmp_path / "a") == 0
    assert steps_on(url)[-1] == 9
    proxy.stop()


def test_data_and_model_on_the_store(tmp_path, bucket, cache, uninterrupted, capfd):
    write_documents(tmp_path / "documents.jsonl")
    lines = (tmp_path / "documents.jsonl").read_text().splitlines(keepends=True)
    with open_store(f"{bucket}/data") as store:
        store.write("part-0.jsonl", "".join(lines[:90]).encode())
        store.write("more/part-1.jsonl", "".join(lines[90:]).encode())
        store.write("notes.bin", b"not data")
    sources = {"sources": [{"path": f"{bucket}/data/**/*.jsonl"}], "tokenizer": {"vocab_size": 300}, "workers": 1}
    run_of(tmp_path / "a", f"{bucket}/runs/x", steps=3, data={**sources, "validation": 0.1})
    assert train(tmp_path / "a") == 0
    assert "200 documents" in capfd.readouterr().out
    # The same data again: nothing is tokenised anew, because the copies have the times of the store.
    assert train(tmp_path / "a", "train.steps=4", "--allow-change", "train.steps") == 0
    assert "tokenizing" not in capfd.readouterr().err
    # The export of the run is the model of another run.
    run_of(
        tmp_path / "b",
        str(tmp_path / "b" / "run"),
        steps=3,
        model={"source": f"{bucket}/runs/x/hf", "init": "pretrained"},
        data={
            "sources": [{"path": f"{bucket}/data/part-0.jsonl"}],
            "tokenizer": f"{bucket}/runs/x/hf",
            "workers": 1,
            "validation": 0.1,
        },
    )
    text = (tmp_path / "b" / "run.toml").read_text()
    (tmp_path / "b" / "run.toml").write_text(re.sub(r"\[model\.config\]\n(?:\w.*\n)+", "", text))
    assert train(tmp_path / "b") == 0
    assert "90 documents" in capfd.readouterr().out


def test_no_secret_is_printed_or_stored(tmp_path, bucket, cache, capfd):
    url = f"{bucket}/runs/x"
    run_of(tmp_path / "a", url, steps=3)
    assert train(tmp_path / "a") == 0
    output = capfd.readouterr()
    assert "secret-of-the-tests" not in output.out + output.err
    assert "AKIDTESTING" not in output.out + output.err
    texts = [path.read_bytes() for path in [*cache.rglob("*"), *tmp_path.rglob("*")] if path.is_file()]
    assert not any(b"secret-of-the-tests" in text or b"AKIDTESTING" in text for text in texts)
    with open_store(url) as store:
        for name, file in store.list_files().items():
            assert b"secret-of-the-tests" not in store.read(name, 0, file.size)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("data.cache", "s3://b/x"),
        ("data.exclude_rows", "s3://b/x"),
        ("train.offload_dir", "s3://b/x"),
        ("cluster.source", "s3://b/x"),
        ("data.chat.template", "s3://b/x"),
    ],
)
def test_what_needs_a_folder_of_this_machine_says_so(tmp_path, key, value):
    file = run_of(tmp_path / "a", "run")
    with pytest.raises(ConfigError, match=rf"{key}: s3://b/x is a URL, but this must be a file or folder of this mach"):
        load(file, [f"{key}={value}"])


def test_a_run_inside_its_data_is_refused(tmp_path, cache):
    (tmp_path / "store").mkdir()
    write_documents(tmp_path / "store" / "documents.jsonl")
    url = f"file://{tmp_path}/store"
    run_of(tmp_path / "a", f"{url}/run", data__sources=[{"path": f"{url}/**/*.jsonl"}])
    with pytest.raises(ConfigError, match=r"lies inside data source .*, which would read files that the run writes"):
        train_raising(tmp_path / "a")


def train_raising(folder):
    from kumi.train.start import start

    with contextlib.chdir(folder):
        return start(load("run.toml"))


def test_a_rank_that_does_not_see_the_folder_of_rank_0_is_named(tmp_path, cache):
    config = load(run_of(tmp_path / "a", "s3://bucket/runs/x"))
    check_shared_folder(config, "")  # train.out is a folder
    with pytest.raises(
        ConfigError, match="is not the same folder on this machine as on that of rank 0; set KUMI_CACHE"
    ):
        check_shared_folder(config, "name")
    folder = local_run_folder(config.train.out).parent
    folder.mkdir(parents=True)
    (folder / "start.json").write_text('{"start": "name"}')
    check_shared_folder(config, "name")
    assert Path(folder).is_relative_to(cache)


def test_a_signal_saves_and_uploads(tmp_path, cache):
    """SIGTERM to the process: it saves, uploads what it saved, and ends with 143. The mirror has ended, too."""
    url, folder = f"file://{tmp_path}/store/run", tmp_path / "a"
    run_of(folder, url, steps=5000, log={"every": 1}, checkpoint={"every": 0, "keep": 2})
    pid = command(folder, None, "two", folder / "output.txt")
    until = time.monotonic() + 120
    while "step 3/" not in (folder / "output.txt").read_text() and time.monotonic() < until:
        time.sleep(0.1)
    os.kill(pid, signal.SIGTERM)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code == 143, (folder / "output.txt").read_text()
    saved = int(re.search(r"saved after step (\d+)", (folder / "output.txt").read_text())[1])
    assert steps_on(url) == [saved]
    assert f"uploaded   {url}" in (folder / "output.txt").read_text()


def test_adapters_cannot_choose_a_url_as_their_base(tmp_path, cache):
    from kumi.convert.merge import open_unmerged

    (tmp_path / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "base_model_name_or_path": f"file://{tmp_path}/base", "r": 8})
    )
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"name the URL file://.* as their base model; name it with --base"):
        open_unmerged(tmp_path)
    assert not cache.exists()


def test_ranks_of_an_outside_launcher_share_the_local_folder(tmp_path, cache, uninterrupted):
    """torchrun starts both ranks, and each looks at the store first; the run is stopped and resumed elsewhere."""
    url, folder = f"file://{tmp_path}/store/run", tmp_path / "a"
    run_of(folder, url, checkpoint={"every": 3, "keep": 2})
    for number in range(2):
        pid = command(folder, None, "torchrun", folder / "output.txt")
        until = time.monotonic() + 120
        while number == 0 and not steps_on(url) and time.monotonic() < until:
            time.sleep(0.05)
        if number == 0:
            os.killpg(pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if number == 0:
            shutil.rmtree(cache)
    assert code == 0, (folder / "output.txt").read_text()
    assert losses(tmp_path / "store" / "run") == uninterrupted
    assert steps_on(url)[-1] == 9
