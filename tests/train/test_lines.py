"""The lines of a run: their width at every magnitude, warnings that are printed once, and busy machines."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.train.test_metrics import ENTRY

from kumi.train.cpu_contention import CpuWait, busy_note, cpu_wait_seconds
from kumi.train.step_lines import WIDTH, legend, step_line
from kumi.units import format_seconds

FIGURES = {
    "perf/mfu": 0.4312,
    "perf/step_s": 1.254,
    "perf/estimated_step_s": 1.21,
    "perf/tokens_per_s": 397_000.0,
    "mem/peak_bytes": 61.2 * 2**30,
    "mem/estimated_bytes": 60.94 * 2**30,
}


def test_a_line_has_measured_beside_estimated():
    assert step_line({**ENTRY, **FIGURES}, 3, "4s") == (
        "step 1/3  loss 2.5000  lr 1.0e-01  norm 1.00  397k tok/s  1.25/1.21 s  61.2/60.9 GiB  eta 4s"
    )
    busy = "machine busy: load 1234.5/1024"
    assert busy in step_line({**ENTRY, **FIGURES, "step": 99_999, "train/skipped_updates": 99_999}, 99_999, "4s", busy)
    assert "  1.25 s  " in step_line({**ENTRY, **FIGURES, "perf/estimated_step_s": None}, 3, "4s")
    small = {**ENTRY, **FIGURES, "perf/step_s": 0.258, "perf/estimated_step_s": 0.0599, "mem/estimated_bytes": 2**20}
    assert "  258/59.9 ms  61.2/0.000977 GiB  " in step_line(small, 3, "4s")


def test_a_step_with_rollouts_shows_their_parts_beside_the_estimates():
    parts = {"time/generate_s": 3.1, "time/score_s": 0.2, "time/log_probs_s": 0.4}
    estimates = {"time/estimated_generate_s": 2.9, "time/estimated_log_probs_s": 0.38}
    entry = {**ENTRY, **FIGURES, "rollout/reward": 0.412, **parts}
    assert "  rollout 3.1+0.2+0.4 s" in step_line(entry, 3, "4s")
    assert "  rollout 3.1/2.9+0.2+0.4/0.38 s" in step_line({**entry, **estimates}, 3, "4s")
    [line] = [line for line in legend(on_cpu=True, step_s=1.0, memory=1, mfu=False, rollouts=True) if "rewards" in line]
    assert line == "rollout    generation + rewards + log-probs; estimates are for the lengths of the batch before"


magnitudes = st.floats(1e-9, 1e9)


@given(
    st.integers(1, 10**12),
    st.integers(0, 10**12),
    magnitudes,
    magnitudes,
    magnitudes,
    magnitudes,
    magnitudes,
    st.none() | magnitudes,
    st.integers(0, 2**60),
    st.integers(0, 2**60),
    st.none() | st.floats(0, 1),
    magnitudes,
    st.none() | st.integers(0, 10**9),
    st.booleans(),
)
def test_a_line_is_never_longer(
    steps, step, loss, lr, norm, rate, time, estimate, peak, memory, mfu, left, skipped, busy
):
    entry = {
        "step": step,
        "train/loss": loss,
        "train/lr": lr,
        "train/grad_norm": norm,
        "perf/tokens_per_s": rate,
        "perf/step_s": time,
        "perf/estimated_step_s": estimate,
        "mem/peak_bytes": peak,
        "mem/estimated_bytes": memory,
        "perf/mfu": mfu,
    }
    if skipped is not None:
        entry |= {"train/skipped_updates": skipped, "train/loss_scale": rate}
    warning = "machine busy: load 1234.5/1024" if busy else ""
    line = step_line(entry, steps, format_seconds(left), warning)
    assert len(line) <= WIDTH == 100
    assert line.startswith(f"step {step}/{steps}  loss ")
    assert re.search(r"  \S+ m?s(  |$)", line)
    if estimate is not None:
        assert re.search(r"  \S+/\S+ m?s(  |$)", line)
    # Beyond these sizes the line may have no room for the machine's load.
    seconds = (time,) if estimate is None else (time, estimate)
    if max(steps, step, skipped or 0) < 10**5 and loss <= 100 and all(1e-3 <= value <= 999 for value in seconds):
        assert warning in line
    assert ("skipped " in line) == bool(skipped)


@pytest.mark.parametrize("mfu", [True, False])
@pytest.mark.parametrize("step_s", [None, 1e-9, 0.548, 1e9])
def test_the_legend_says_once_what_stays(mfu, step_s):
    lines = legend(on_cpu=True, step_s=step_s, memory=2**60, mfu=mfu)
    assert all(len(line) <= WIDTH for line in lines)
    text = "\n".join(lines)
    assert ("MFU        not known, because the device's peak FLOPs are not known" in text) is not mfu
    assert ("the device's speed is not known" in text) is (step_s is None)
    assert "the growth of the process" in text


def test_the_machine_is_called_busy_only_where_that_explains_a_slow_step():
    assert busy_note(8.37, 0.548, 0.7, 9.1, 2) == "machine busy: load 9.1/2"
    assert busy_note(0.6, 0.548, 0.7, 9.1, 2) == ""  # as fast as expected
    assert busy_note(8.37, 0.548, 0.05, 9.1, 2) == ""  # slow, but the process had its CPU
    assert busy_note(8.37, None, 0.7, 9.1, 2) == ""  # no step to compare with
    assert busy_note(8.37, 0.548, None, 9.1, 2) == "machine busy: load 9.1/2"
    assert busy_note(8.37, 0.548, None, 2.1, 2) == ""


def test_the_wait_of_a_span_is_that_of_its_thread(monkeypatch):
    if not cpu_wait_seconds():
        pytest.skip("this kernel does not count how long threads wait for a CPU")
    waits, clock = {"1": 5.0, "2": 1.0}, [0.0]
    monkeypatch.setattr("kumi.train.cpu_contention.cpu_wait_seconds", lambda: dict(waits))
    monkeypatch.setattr("kumi.train.cpu_contention.time.perf_counter", lambda: clock[0])
    watch = CpuWait()
    waits["2"], clock[0] = 2.0, 4.0  # a quarter of four seconds
    assert watch.explain(4.0, 1.0).startswith("machine busy: load ")
    clock[0] = 8.0  # nothing more
    assert watch.explain(4.0, 1.0) == ""
    waits["3"], clock[0] = 1.0, 12.0  # a new thread; compared with the fastest step where there is no estimate
    assert watch.explain(4.0, None) == ""
    waits["3"], clock[0] = 5.0, 17.5
    assert watch.explain(5.5, None).startswith("machine busy: load ")
