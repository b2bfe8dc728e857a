"""The report in a terminal of 80 or more columns, or in a pipe; colours only repeat information that the text has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kumi.plan.report import Report
from kumi.report import phrases
from kumi.report.advice import advice, verdict
from kumi.report.bottleneck import bottlenecks, levers
from kumi.report.brief import brief, title
from kumi.report.palette import MEMORY_COLOURS
from kumi.report.quantities import (
    StageGroup,
    fullest,
    gap,
    memory_kinds,
    noticeable,
    pick,
    savings_needed,
    stage_groups,
    time_kinds,
    traffic,
)
from kumi.report.rules_of_thumb import Rule, misleading
from kumi.report.summary import headline
from kumi.units import format_bytes

# The most pipeline ranks shown; --json and the page have all of them.
STAGES = 8


@dataclass(frozen=True)
class Bar:
    """A bar over `share` of the available width; `#` replaces block characters on ASCII terminals."""

    share: float

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        eighths = round(8 * options.max_width * min(1.0, self.share))
        if options.ascii_only:
            yield Text("#" * (eighths // 8))
        else:
            yield Text("█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].rstrip())


@dataclass(frozen=True)
class StageBar:
    """The memory of a stage as a bar over `capacity`: each kind repeats its letter in proportion to its bytes."""

    kinds: tuple[tuple[str, int], ...]
    capacity: float

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        line, drawn = Text(), 0
        scale = max(self.capacity, sum(size for _, size in self.kinds))
        total = 0
        for kind, size in self.kinds:
            total += size
            end = round(total / scale * options.max_width)
            line.append(phrases.LETTERS[kind] * (end - drawn), style=MEMORY_COLOURS[kind])
            drawn = end
        yield line.append("." * (options.max_width - drawn))


def render_report(report: Report) -> RenderableType:
    """Return all sections of the report for a rich console."""
    return Group(*_sections(report))


def render_brief(report: Report, command: str = "") -> RenderableType:
    """Return the brief for a rich console; `command`: how to train with the plan."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=False)
    table.add_column("label", style="dim", no_wrap=True)
    table.add_column("text", overflow="fold")
    for line in brief(report, command):
        table.add_row(line.label, Text(line.text))
    return Group(Text(title(report.job), style="bold"), table)


def _sections(report: Report) -> Iterator[RenderableType]:
    """Yield the sections of the report, without those that it has no data for."""
    yield _headline(report)
    yield _section("Why", _bullets([*bottlenecks(report), *advice(report)]))
    pipeline = report.best.layout.pp > 1
    yield _section(f"Memory{f' of pp rank {fullest(report.best)} (the fullest)' * pipeline}", _memory(report))
    if pipeline:
        yield _section("Memory of the pipeline ranks, relative to the usable memory", _stages(report))
    yield _section("Time of a step", _time(report))
    if report.best.collectives:
        yield _section("Communication of a rank per step", _traffic(report))
    yield _section("Potential savings per step (upper bounds)", _levers(report))
    if report.others:
        yield _section("Runners-up", _others(report))
    if report.expected:
        yield _section("Standard layouts for comparison", _expected(report))
    rules = misleading(report)
    if rules:
        yield _section("Rules of thumb that mislead here", _bullets([rule_text(rule) for rule in rules]))
    yield Group(Text("\nTo pin this layout", style="bold"), Text(phrases.layout_toml(report.best.layout)))


def _section(title: str, content: RenderableType) -> RenderableType:
    return Group(Text(), Text(title, style="bold"), Padding(content, (0, 0, 0, 2)))


def _bullets(sentences: list[str]) -> RenderableType:
    """Return the sentences as a list with dashes."""
    grid = Table.grid(padding=(0, 1))
    for sentence in sentences:
        grid.add_row("-", Text(sentence))
    return grid


def _headline(report: Report) -> RenderableType:
    return Group(*(Text(line, style="bold" if index == 1 else "") for index, line in enumerate(headline(report))))


def _figures(*columns: str) -> Table:
    """Return a table with right-aligned columns of figures; a name that ends in a dot makes a column of text."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", expand=True, pad_edge=False)
    for name in columns:
        if name.endswith("."):
            table.add_column(name[:-1], ratio=1, overflow="fold")
        else:
            table.add_column(name, justify="right", no_wrap=True)
    return table


def _memory(report: Report) -> RenderableType:
    """Return the memory of the fullest rank by kind, with bars over the usable memory."""
    best = report.best
    memory = best.memory[fullest(best)]
    table = Table(box=None, padding=(0, 2, 0, 0), expand=True, pad_edge=False, show_header=False)
    for kind in ("letter", "name", "bytes", "share"):
        table.add_column(kind, justify="left" if kind in ("letter", "name") else "right", no_wrap=True)
    table.add_column("bar", ratio=1)
    rows = [(phrases.LETTERS[kind], phrases.MEMORY[kind], size) for kind, size in memory_kinds(memory)]
    for letter, name, size in [*rows, ("", "total", memory.total)]:
        share = size / best.usable
        table.add_row(letter, name, format_bytes(size), phrases.percent(share), Bar(share))
    return table


def _stages(report: Report) -> RenderableType:
    """Return a bar of letters for the memory of each group of pipeline ranks, of at most `STAGES` groups."""
    best = report.best
    groups = stage_groups(best)
    fullest_group = next(index for index, group in enumerate(groups) if group.first <= fullest(best) <= group.last)
    shown = [groups[index] for index in pick(len(groups), STAGES, fullest_group)]
    table = Table(box=None, padding=(0, 2, 0, 0), expand=True, pad_edge=False, show_header=False)
    table.add_column("rank", no_wrap=True)
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("bar", ratio=1)
    for group in shown:
        table.add_row(group.name, format_bytes(group.memory.total), _stage_bar(group, best.usable))
    if len(shown) < len(groups):
        table.add_row("", "", f"{len(shown)} of {len(groups)} ranks; all are in --json")
    return table


def _stage_bar(group: StageGroup, usable: int) -> StageBar:
    return StageBar(tuple(memory_kinds(group.memory)), usable)


def _time(report: Report) -> RenderableType:
    """Return the time of a step by kind, with bars over the step."""
    best = report.best
    table = Table(box=None, padding=(0, 2, 0, 0), expand=True, pad_edge=False, show_header=False)
    table.add_column("kind", no_wrap=True)
    table.add_column("seconds", justify="right", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    table.add_column("bar", ratio=1)
    for kind, value in time_kinds(best):
        share = value / best.step_seconds
        table.add_row(phrases.time_name(kind), phrases.seconds(value), phrases.percent(share), Bar(share))
    return table


def _traffic(report: Report) -> RenderableType:
    """Return the communication of a rank by axis and link."""
    table = _figures("axis and link.", "messages", "bytes", "time", "exposed", "achieved", "bandwidth")
    for row in noticeable(traffic(report.job, report.best), report.best.step_seconds):
        achieved = phrases.rate(row.sent / row.busy) if row.busy else "-"
        bandwidth = phrases.rate(row.bandwidth) if row.bandwidth else "unknown"
        table.add_row(
            row.name,
            f"{row.count:,}",
            phrases.volume(row.sent),
            phrases.seconds(row.busy),
            phrases.seconds(row.exposed),
            achieved,
            bandwidth,
        )
    return table


def _levers(report: Report) -> RenderableType:
    """Return the changes that would save time."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=False)
    for lever in levers(report):
        share = phrases.percent(lever.seconds / report.best.step_seconds)
        table.add_row(lever.what, Text(phrases.seconds(lever.seconds), justify="right"), share, f"reduces {lever.why}")
    return table


def _others(report: Report) -> RenderableType:
    """Return the runners-up, and what each needs to match the chosen layout."""
    table = _figures("layout.", "step", "memory", "needed to match.")
    for other in report.others:
        difference = gap(report.best, other)
        savings = "within noise" if difference.noise else savings_needed(difference)
        table.add_row(
            phrases.layout_words(other.layout),
            phrases.seconds(other.step_seconds),
            format_bytes(other.peak_memory),
            savings,
        )
    return table


def _expected(report: Report) -> RenderableType:
    """Return the standard layouts, each with a verdict."""
    table = _figures("layout.", "step", "memory", "verdict.")
    for item in report.expected:
        step, memory = "-", "-"
        if item.estimate is not None:
            step, memory = phrases.seconds(item.estimate.step_seconds), format_bytes(item.estimate.peak_memory)
        table.add_row(Text(item.title), step, memory, Text(verdict(item, report.best)))
    return table


def rule_text(rule: Rule) -> str:
    """Return a misleading rule as sentences: both values, then the reason for the difference."""
    where = f" for {rule.where}" if rule.where else ""
    values = f"{rule.texts[0]} by the rule, {rule.texts[1]} estimated{where}"
    return f"{phrases.capital(rule.name)}: {values}. {phrases.capital(rule.why)}."
