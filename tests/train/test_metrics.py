import json
import sys
import types

import pytest

from kumi.train.metrics import Metrics, truncate_metrics

ENTRY = {
    "step": 1,
    "tokens": 10,
    "train/loss": 2.5,
    "train/grad_norm": 1.0,
    "train/lr": 0.1,
    "perf/step_s": 1.0,
    "perf/estimated_step_s": 0.8,
    "perf/tokens_per_s": 10.0,
    "perf/mfu": None,
    "time/data_s": 0.0,
    "mem/peak_bytes": 1,
    "mem/estimated_bytes": 2,
}


def make(out, trackers=()):
    return Metrics(out, name="run", steps=3, first_step=0, every=1, trackers=trackers)


def fake(monkeypatch, name, **functions):
    module = types.ModuleType(name)
    for key, function in functions.items():
        setattr(module, key, function)
    monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("kind", ["wandb", "trackio", "mlflow"])
def test_trackers_get_the_numbers_of_every_entry(tmp_path, monkeypatch, kind):
    sent = []
    log = types.SimpleNamespace(log=lambda values, step: sent.append((step, values)))
    fake(
        monkeypatch,
        kind,
        init=lambda **options: log,
        start_run=lambda **options: None,
        log_metrics=lambda values, step: sent.append((step, values)),
    )
    made = make(tmp_path, (kind,))
    made.step(ENTRY)
    made.close()
    assert [(step, values["train/loss"]) for step, values in sent] == [(1, 2.5)]


def test_a_tracker_that_fails_is_left_out_and_said_so(tmp_path, monkeypatch, capsys):
    def refuse(**options):
        raise ConnectionError("no network")

    fake(monkeypatch, "wandb", init=refuse)
    broken = types.SimpleNamespace(log=lambda values, step: refuse())
    fake(monkeypatch, "trackio", init=lambda **options: broken)
    made = make(tmp_path, ("wandb", "trackio"))
    made.step(ENTRY)
    made.step({**ENTRY, "step": 2})
    made.close()
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "wandb: cannot be started, so metrics are not sent there: no network",
        "trackio: failed, so metrics are no longer sent there: no network",
    ]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_what_is_not_finite_is_null(tmp_path):
    made = make(tmp_path)
    made.step({**ENTRY, "train/grad_norm": float("nan")})
    made.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["train/grad_norm"] is None


def test_lines_after_the_step_and_half_lines_go(tmp_path):
    file = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step}) for step in (1, 2, 2, 3)]
    file.write_text("\n".join(lines) + '\n{"step": 4, "tra')
    truncate_metrics(file, 2)
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [1, 2, 2]
