"""A check, what the nodes measured for it, and the finding: one line of the doctor's table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from kumi.doctor.here import Here

# skip: the check does not apply here, or could not be made. The value says why.
Verdict = Literal["ok", "warn", "fail", "skip"]


@dataclass(frozen=True)
class Reading:
    """What one node measured for one check.

    `value`: plain JSON data that the check's rule understands, or text.
    `need`: the least value that the run needs, if the check compares with one.
    `problems`, `warnings`: sentences about this node that fail the check, or that deserve a warning.
    `absent`: why there is nothing to measure on this node, or "".
    """

    value: Any = None
    need: float | None = None
    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    absent: str = ""

    def plain(self) -> dict[str, Any]:
        """Return this reading as JSON data."""
        return asdict(self)


def parse_reading(plain: Mapping[str, Any]) -> Reading:
    """Return the reading that `Reading.plain` wrote."""
    problems, warnings = (tuple(map(str, plain.get(name, ()))) for name in ("problems", "warnings"))
    return Reading(plain.get("value"), plain.get("need"), problems, warnings, str(plain.get("absent", "")))


@dataclass(frozen=True)
class Fleet:
    """The nodes that met, for sentences. `noun`: node, or rank where a launcher started one process per device.

    `hosts`: the host name of each, by number.
    """

    noun: str
    hosts: Mapping[int, str]

    def label(self, node: int) -> str:
        """Return the name of a node in sentences: its number, and its host name if it came."""
        return f"{self.noun} {node} ({self.hosts[node]})" if node in self.hosts else f"{self.noun} {node}"

    def about(self, node: int, text: str) -> str:
        """Return `text` about `node`; the node's name is left out if it is the only one."""
        return f"{self.label(node)}: {text}" if len(self.hosts) > 1 else text


@dataclass(frozen=True)
class Judgement:
    """A rule's opinion of all readings of a check.

    `limit`: what the check asks for. `nodes`: the numbers of the nodes to look at.
    """

    verdict: Verdict
    value: str
    limit: str
    nodes: tuple[int, ...] = ()


# Judges the readings without problems, by node. There is at least one, and none is absent.
Rule = Callable[[Mapping[int, Reading], Fleet], Judgement]


@dataclass(frozen=True)
class Check:
    """A line of the table of checks.

    `measure`: takes the reading of this node. An OSError, ValueError, ArithmeticError or LookupError
        that it raises becomes a problem of the reading.
    `rule`: judges the readings of all nodes.
    `remedy`: what to do if the verdict is warn or fail.
    `together`: all nodes measure at the same time, after the other checks; `measure` may exchange messages.
    `needs`: names of checks that must not have failed before this one is made.
    `seconds`: the time after which a node counts as lost in this check.
    `stops_run`: a failure keeps a run from starting. A slow node does not: the run is slow, but right.
    """

    name: str
    measure: Callable[[Here], Reading]
    rule: Rule
    remedy: str
    together: bool = False
    needs: tuple[str, ...] = ()
    seconds: float = 10.0
    stops_run: bool = True


@dataclass(frozen=True)
class Finding:
    """One line of the result. `remedy` is empty unless the verdict is warn or fail."""

    name: str
    value: str
    limit: str
    verdict: Verdict
    remedy: str
    nodes: tuple[int, ...] = ()


def take_reading(check: Check, here: Here) -> Reading:
    """Return this node's reading of `check`. An error while measuring becomes a problem of the reading."""
    try:
        return check.measure(here)
    except (OSError, ValueError, ArithmeticError, LookupError) as error:
        return Reading(problems=(f"could not be checked ({type(error).__name__}: {error})",))


def judge(check: Check, readings: Mapping[int, Reading], fleet: Fleet) -> Finding:
    """Return the finding for the readings of all nodes: problems first, then the rule."""
    measured = {node: reading for node, reading in readings.items() if not reading.absent}
    if not measured:
        reasons = sorted({reading.absent for reading in readings.values()})
        return Finding(check.name, "; ".join(reasons) or "no node measured this", "", "skip", "")
    judgement = _with_sentences(_judgement(check, measured, fleet), measured, fleet)
    remedy = check.remedy if judgement.verdict in ("warn", "fail") else ""
    return Finding(check.name, judgement.value, judgement.limit, judgement.verdict, remedy, judgement.nodes)


def _judgement(check: Check, readings: Mapping[int, Reading], fleet: Fleet) -> Judgement:
    """Return the rule's judgement of the readings without problems; a bare failure if all readings have problems."""
    sound = {node: reading for node, reading in readings.items() if not reading.problems}
    return check.rule(sound, fleet) if sound else Judgement("fail", "", "")


def _with_sentences(judgement: Judgement, readings: Mapping[int, Reading], fleet: Fleet) -> Judgement:
    """Return `judgement` with the problems and warnings of single nodes; they replace the value if the verdict
    is ok."""
    verdict, nodes = judgement.verdict, set(judgement.nodes)
    texts = [] if verdict in ("ok", "skip") else [judgement.value]
    for node, reading in readings.items():
        for sentence in (*reading.problems, *reading.warnings):
            texts.append(fleet.about(node, sentence))
            nodes.add(node)
        if reading.problems:
            verdict = "fail"
        elif reading.warnings and verdict != "fail":
            verdict = "warn"
    value = "; ".join(text for text in texts if text) or judgement.value
    return Judgement(verdict, value, judgement.limit, tuple(sorted(nodes)))
