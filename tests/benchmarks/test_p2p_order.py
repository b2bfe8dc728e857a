"""Messages between pipeline ranks under NCCL's rules: no ranks are stuck, and none waits for another neighbour's."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import p2p_order
import pytest
import torch
import torch.distributed as dist
from p2p_order import COMMUNICATORS, Grouped, Simulation, case, random_case
from torch import nn

from kumi.parallel import pipeline
from kumi.parallel.mesh import Mesh, RankInfo
from kumi.spec.layout import Layout
from kumi.spec.pipeline_channels import pipeline_channels
from kumi.spec.schedule import stage_assignment
from kumi.spec.schedules import SCHEDULES
from kumi.spec.schedules.schedule_record import Action
from kumi.spec.sends_and_recvs import Message, Receive, Send, forward_pipeline_steps, pipeline_steps

ROOT = Path(__file__).parents[2]
BAR = 0.01  # of a step, over independent edges
CASES = [pytest.param(range(300), id="300"), pytest.param(range(300, 10_000), marks=pytest.mark.exhaustive, id="10000")]


@pytest.mark.parametrize("numbers", CASES)
def test_no_random_case_is_stuck_and_channels_expose_no_more_than_independent_edges(numbers):
    names = set()
    for number in numbers:
        each = random_case(number)
        names.add(each.name)
        each.step_seconds("single")  # raises if ranks are stuck, even if a device runs only one operation at a time
        assert each.step_seconds("channels") <= (1 + BAR) * each.step_seconds("edges"), number
    assert names == {*SCHEDULES, "evaluation"}


def test_one_communicator_for_each_kind_exposes_more():
    exposed = defaultdict(list)
    numbers = [number for number in range(70) if list(SCHEDULES)[number % len(SCHEDULES)] in ("interleaved", "zb-v")]
    for each in map(random_case, numbers):
        exposed[each.name].append(each.step_seconds("kinds") / each.step_seconds("edges") - 1)
    for name in ("interleaved", "zb-v"):
        assert sum(exposed[name]) / len(exposed[name]) > BAR


def test_a_step_by_hand():
    """Two ranks, one microbatch: forward 1, transfer 0.5, forward 1, backward 2, transfer 0.5, backward 2."""
    lists = pipeline_steps("1f1b", 2, 1, 1)
    seconds = {step: {"F": 1.0, "B": 2.0}[step.kind] for steps in lists for step in steps if isinstance(step, Action)}
    seconds |= {step.message: 0.5 for steps in lists for step in steps if isinstance(step, Send)}
    each = case("by hand", lists, [[0], [1]], seconds)
    assert {name: each.step_seconds(name) for name in COMMUNICATORS} == dict.fromkeys(COMMUNICATORS, 7.0)


BUSY = Action("F", 9, 0)
UP, DOWN, ASIDE = (
    Message("activation", 0, 0, 0, 1),
    Message("activation", 2, 0, 1, 0),
    Message("activation", 1, 0, 0, 2),
)


def seconds_of(*lists, names):
    messages = (UP, DOWN, ASIDE, UP._replace(microbatch=1))
    seconds = {BUSY: 10.0} | dict.fromkeys(messages, 1.0)
    return Simulation(lists, {}, seconds, {message: names(message) for message in messages}).run()


def test_a_message_waits_for_those_before_it_on_its_communicator():
    """Rank 0 sends to rank 2, which is busy for 10 seconds, and then to rank 1, which computes behind its receive."""
    take = Action("B", 1, 0)
    lists = ([Send(ASIDE), Send(UP)], [Receive(UP), take], [BUSY, Receive(ASIDE)])
    seconds, inputs = {BUSY: 10.0, take: 10.0, UP: 1.0, ASIDE: 1.0}, {take: UP}
    assert Simulation(lists, inputs, seconds, {UP: "", ASIDE: ""}).run() == 22.0
    assert Simulation(lists, inputs, seconds, {UP: "up", ASIDE: "aside"}).run() == 11.0


def test_ranks_that_send_to_each_other_at_once_are_stuck_unless_the_posts_are_grouped():
    first, second = [Send(UP), Receive(DOWN)], [Send(DOWN), Receive(UP)]
    with pytest.raises(RuntimeError, match=r"ranks \[0, 1\] wait for each other"):
        seconds_of(first, second, names=lambda message: "")
    assert seconds_of(first, second, names=lambda message: message.source) == 1.0
    assert seconds_of([Grouped(tuple(first))], [Grouped(tuple(second))], names=lambda message: "") == 1.0


def test_a_group_ends_when_all_of_it_has():
    lists = ([Grouped((Send(UP), Send(ASIDE))), Receive(DOWN)], [Receive(UP), Send(DOWN)], [BUSY, Receive(ASIDE)])
    assert seconds_of(*lists, names=lambda message: "") == 12.0


def test_a_receive_takes_the_next_message_of_its_sender_whichever_it_is():
    later = UP._replace(microbatch=1)
    with pytest.raises(ValueError, match=r"on rank 1 the next is Receive.* on rank 0 Send"):
        seconds_of([Send(UP), Send(later)], [Receive(later), Receive(UP)], names=lambda message: "")


def test_swapped_posts_of_a_schedule_are_noticed():
    lists = [list(steps) for steps in pipeline_steps("1f1b", 2, 1, 4)]
    places = [index for index, step in enumerate(lists[1]) if isinstance(step, Send | Receive)]
    send = next(index for index in places if isinstance(lists[1][index], Send))
    receive = next(index for index in places if index > send)
    lists[1][send], lists[1][receive] = lists[1][receive], lists[1][send]
    seconds = {getattr(step, "message", step): 1.0 for steps in lists for step in steps}
    with pytest.raises(RuntimeError, match="wait for each other"):
        case("swapped", lists, [[0], [1]], seconds).step_seconds("single")


class Stage(nn.Module):
    """A stage with one weight, in place of a decoder with some of the layers."""

    spec, compute_dtype = SimpleNamespace(hidden_size=2), torch.float32

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, hidden, **inputs):
        return hidden.unsqueeze(-1) * self.weight if hidden.ndim == 2 else hidden * self.weight


class LossStage(Stage):
    def forward(self, hidden, **inputs):
        return super().forward(hidden).sum()


def posts(monkeypatch, layout, rank, steps, microbatches):
    """Return what the executor posts for `steps` of `rank` on GPUs: kind of operation, communicator, other rank."""
    posted = []
    done = SimpleNamespace(wait=lambda: None, is_completed=lambda: True)
    monkeypatch.setattr(dist, "isend", lambda x, group, group_dst: posted.append(("Send", group, group_dst)) or done)
    monkeypatch.setattr(dist, "irecv", lambda x, group, group_src: posted.append(("Receive", group, group_src)) or done)
    channels = pipeline_channels(layout.schedule, layout.pp, layout.stages)
    mesh = Mesh(layout, RankInfo(rank, layout.pp, rank, torch.device("cpu")), {name: name for name in channels})
    last = layout.pp * layout.stages - 1
    own = stage_assignment(layout.schedule, layout.pp, layout.stages)[rank]
    training = any(isinstance(step, Action) and step.kind != "F" for step in steps)
    pipeline._execute(
        pipeline._Run(
            mesh,
            {number: LossStage() if number == last else Stage() for number in own},
            last,
            [{"input_ids": torch.ones(1, 3)}] * microbatches,
            {step.stage: step for step in steps if isinstance(step, Action)},
            training,
            None,
        ),
        steps,
    )
    return posted


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("make_steps", [pipeline_steps, forward_pipeline_steps])
def test_the_executor_posts_the_operations_that_are_simulated(monkeypatch, schedule, make_steps):
    layout = Layout(pp=3, schedule=schedule, stages=SCHEDULES[schedule].stages)
    for rank, steps in enumerate(make_steps(schedule, 3, layout.stages, 6)):
        simulated = []
        for step in steps:
            if isinstance(step, Send | Receive):
                other = step.message.target if isinstance(step, Send) else step.message.source
                simulated.append((type(step).__name__, COMMUNICATORS["channels"](step.message, 3), other))
        assert posts(monkeypatch, layout, rank, steps, 6) == simulated


def test_the_command_prints_and_writes_its_figures(monkeypatch, capsys, tmp_path):
    path = tmp_path / "figures.json"
    monkeypatch.setattr("sys.argv", ["p2p_order.py", "--cases", "14", "--workers", "1", "--json", str(path)])
    p2p_order.main()
    rows = json.loads(path.read_text())["schedules"]
    assert sum(row["cases"] for row in rows.values()) == 14
    assert all(row["stuck"] == 0 and row["channels_most"] <= BAR for row in rows.values())
    assert "zb-v" in capsys.readouterr().out


def test_the_page_has_the_figures_of_the_recorded_simulation():
    rows = json.loads((ROOT / "benchmarks" / "results" / "p2p_order.json").read_text())["schedules"]
    page = (ROOT / "docs" / "decisions" / "pipeline-executor.md").read_text()
    assert sum(row["cases"] for row in rows.values()) == 10_000
    for name, row in rows.items():
        assert row["stuck"] == 0
        assert row["channels_most"] <= BAR
        shares = [f"{row[column]:.1%}" for column in p2p_order.COLUMNS]
        title = f"`{name}`" if name in SCHEDULES else name
        assert f"| {title} | {row['cases']:,} | 0 | {' | '.join(shares)} |" in page
