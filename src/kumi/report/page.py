"""The report as one self-contained HTML page: no network, no script, with styles for print and dark mode."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from kumi.plan.estimates import Estimate
from kumi.plan.report import Report
from kumi.report import phrases
from kumi.report.advice import advice, verdict
from kumi.report.bottleneck import bottlenecks, levers
from kumi.report.brief import brief, title
from kumi.report.pictures import pictures
from kumi.report.quantities import gap, savings_needed, stage_groups, time_kinds, traffic
from kumi.report.rules_of_thumb import misleading
from kumi.units import format_bytes

_STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --paper: #ffffff; --soft: #6b6b6b; --rule: #d4d4d4; --tint: #f4f4f2 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8e8e6; --paper: #17181a; --soft: #a0a0a0; --rule: #45474a; --tint: #222427 }
}
body { margin: 0 auto; padding: 1.5rem; max-width: 60rem; color: var(--ink); background: var(--paper);
       font: 16px/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", Arial, sans-serif }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 .5rem } h2 { font-size: 1.15rem; margin: 2.2rem 0 .5rem }
dl { margin: .75rem 0 } dl div { display: grid; grid-template-columns: 8rem 1fr; padding: .2rem 0 }
dl div { border-bottom: 1px solid var(--rule) } dt { color: var(--soft) } dd { margin: 0 }
@media (max-width: 40rem) { dl div { grid-template-columns: 1fr } body { padding: 1rem } }
.soft { color: var(--soft) }
figure { margin: 1rem 0; overflow-x: auto }
figure svg { width: 100%; min-width: 36rem; height: auto; color: var(--ink) }
svg .paper { fill: none } svg .edge { stroke: var(--paper) }
figcaption, caption { color: var(--soft); font-size: .9rem; text-align: left }
.wide { overflow-x: auto } table { border-collapse: collapse; width: 100%; font-size: .9rem; margin: .5rem 0 }
th, td { padding: .25rem .6rem .25rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--rule) }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums } td.n, tbody th.k { white-space: nowrap }
pre { background: var(--tint); padding: .75rem 1rem; overflow-x: auto; font-size: .9rem; border-radius: 4px }
li { margin: .25rem 0 }
@media print {
  :root { --ink: #000; --paper: #fff; --soft: #444; --rule: #bbb; --tint: #f2f2f2 }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact }
  body { max-width: none; padding: 0; font-size: 11pt } .wide, figure { overflow: visible }
  figure svg { min-width: 0 } table { font-size: 8pt }
  th, td { padding-right: .4rem } figure, tr, pre, li { break-inside: avoid }
  h2 { break-after: avoid }
}
"""


def page(report: Report) -> str:
    """Return the HTML document."""
    name = escape(phrases.arrangement(report.best.layout))
    body = "\n".join([*_head(report), *_sections(report)])
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{name}: kumi plan</title>\n<style>{_STYLE}</style>\n</head>\n"
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def _head(report: Report) -> Iterator[str]:
    """Yield the title, the brief and the note on MFU."""
    yield f'<p class="soft">{escape(title(report.job))}</p>'
    yield f"<h1>{escape(phrases.arrangement(report.best.layout))}</h1>"
    lines = (f"<div><dt>{escape(line.label)}</dt><dd>{escape(line.text)}</dd></div>" for line in brief(report))
    yield f"<dl>{''.join(lines)}</dl>"
    yield f'<p class="soft">MFU: {escape(phrases.counted_flops(report.job))}.</p>'


def _sections(report: Report) -> Iterator[str]:
    """Yield the sections of the page, with the pictures that the report has."""
    drawn = pictures(report)
    yield _section("Why this layout", _list([*bottlenecks(report), *advice(report)]))
    yield _section("To pin this layout", f"<pre>{escape(phrases.layout_toml(report.best.layout))}</pre>")
    yield _section("Memory", _figure(drawn["memory"], "Peak memory of each pipeline rank."), _memory(report.best))
    yield _section(
        "Time of a step",
        _figure(drawn["time"], "Time of the rank that determines the length of the step."),
        _time(report.best),
    )
    if "timeline" in drawn:
        caption = "Timeline of each pipeline rank. Gaps are the bubble, numbers are microbatches."
        start = [_figure(drawn["timeline-start"], "The beginning, enlarged.")] if "timeline-start" in drawn else []
        yield _section("Pipeline", _figure(drawn["timeline"], caption), *start, _stages(report.best))
    if "traffic" in drawn:
        caption = "Time for which the messages of a rank occupy each link, and the bandwidth that they achieve."
        yield _section("Communication", _figure(drawn["traffic"], caption), _traffic(report))
    yield _section("Potential savings per step (upper bounds)", _levers(report))
    if "choices" in drawn:
        caption = "The chosen layout and those close to it; the tables list more."
        yield _section("Runners-up", _figure(drawn["choices"], caption), _others(report))
    if report.expected:
        caption = "Seconds per step, and memory of the fullest rank."
        yield _section("Standard layouts for comparison", _figure(drawn["expected"], caption), _expected(report))
    if misleading(report):
        yield _section("Rules of thumb that mislead here", _rules(report))


def _section(title: str, *parts: str) -> str:
    return f"<section>\n<h2>{escape(title)}</h2>\n" + "\n".join(parts) + "\n</section>"


def _figure(picture: str, caption: str) -> str:
    return f"<figure>{picture}<figcaption>{escape(caption)}</figcaption></figure>"


def _list(sentences: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences) + "</ul>"


def table(caption: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return an HTML table whose first column is the row header.

    Columns hold figures; a name that ends in a dot makes a column of text.
    """
    classes = ["" if name.endswith(".") else ' class="n"' for name in columns]
    head = "".join(
        f'<th scope="col"{kind}>{escape(name.removesuffix("."))}</th>'
        for name, kind in zip(columns, classes, strict=True)
    )
    body = "".join(
        "<tr>"
        + f'<th scope="row"{_key(row[0])}>{escape(row[0])}</th>'
        + "".join(f"<td{kind}>{escape(cell)}</td>" for cell, kind in zip(row[1:], classes[1:], strict=True))
        + "</tr>"
        for row in rows
    )
    return (
        f'<div class="wide"><table><caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _key(name: str) -> str:
    """Return the class that keeps a short row header on one line."""
    return ' class="k"' if len(name) < 20 else ""


def _memory(best: Estimate) -> str:
    """Return the table of the memory of each group of pipeline ranks by kind."""
    groups = stage_groups(best)
    kinds = [kind for kind in phrases.MEMORY if any(getattr(group.memory, kind) for group in groups)]
    rows = [
        [group.name, *(_gib(getattr(group.memory, kind)) for kind in kinds), _gib(group.memory.total)]
        for group in groups
    ]
    caption = f"Memory of the pipeline ranks in GiB; {_gib(best.usable)} are usable."
    return table(caption, ["rank.", *(phrases.MEMORY[kind] for kind in kinds), "total"], rows)


def _gib(count: float) -> str:
    return f"{count / 2**30:,.2f}"


def _time(best: Estimate) -> str:
    """Return the table of the time of a step by kind."""
    rows = [
        [phrases.time_name(kind), phrases.seconds(value), phrases.percent(value / best.step_seconds)]
        for kind, value in time_kinds(best)
    ]
    return table(
        "Time of a step by kind.",
        ["kind.", "time", "share"],
        [*rows, ["total", phrases.seconds(best.step_seconds), "100%"]],
    )


def _stages(best: Estimate) -> str:
    """Return the table of the pipeline stages."""
    rows = [
        [
            str(index),
            str(stage.rank),
            f"{stage.first}-{stage.last - 1}" if stage.last > stage.first else "none",
            phrases.seconds(stage.forward),
            phrases.seconds(stage.backward_input),
            phrases.seconds(stage.backward_weight),
        ]
        for index, stage in enumerate(best.stages)
    ]
    columns = ["stage.", "rank", "layers", "forward", "gradient of inputs", "gradient of weights"]
    return table("Pipeline stages, with the time of one microbatch in each.", columns, rows)


def _traffic(report: Report) -> str:
    """Return the table of a rank's communication by axis and link."""
    rows = [
        [
            row.name,
            ", ".join(row.kinds),
            f"{row.count:,}",
            phrases.volume(row.sent),
            phrases.seconds(row.busy),
            phrases.seconds(row.exposed),
            phrases.rate(row.sent / row.busy) if row.busy else "-",
            phrases.rate(row.bandwidth) if row.bandwidth else "unknown",
        ]
        for row in traffic(report.job, report.best)
    ]
    columns = ["axis and link.", "messages.", "count", "bytes", "time", "exposed", "achieved", "bandwidth"]
    return table("Communication of a rank per step.", columns, rows)


def _levers(report: Report) -> str:
    """Return the table of the changes that would save time."""
    step = report.best.step_seconds
    rows = [
        [lever.what, phrases.seconds(lever.seconds), phrases.percent(lever.seconds / step), lever.why]
        for lever in levers(report)
    ]
    caption = "The most that each change can save per step."
    return table(caption, ["change.", "saves at most", "share of step", "reduces."], rows)


def _others(report: Report) -> str:
    """Return the table of the chosen layout and the runners-up."""
    rows = []
    for other in report.others:
        difference = gap(report.best, other)
        savings = (
            f"within the model's error ({savings_needed(difference)})"
            if difference.noise
            else savings_needed(difference)
        )
        rows.append(
            [
                phrases.layout_words(other.layout),
                phrases.seconds(other.step_seconds),
                format_bytes(other.peak_memory),
                savings,
            ]
        )
    best = report.best
    chosen = [
        phrases.layout_words(best.layout),
        phrases.seconds(best.step_seconds),
        format_bytes(best.peak_memory),
        "chosen",
    ]
    caption = "Runners-up, fastest first, and the savings that each needs to match the chosen layout."
    return table(caption, ["layout.", "step", "memory", "needed to match."], [chosen, *rows])


def _expected(report: Report) -> str:
    """Return the table of the standard layouts."""
    rows = []
    for item in report.expected:
        step, memory, tokens = "-", "-", "-"
        if item.estimate is not None:
            step, memory = phrases.seconds(item.estimate.step_seconds), format_bytes(item.estimate.peak_memory)
            tokens = f"{item.estimate.tokens_per_second_per_device:,.0f}"
        layout = item.layout if item.estimate is None else item.estimate.layout
        rows.append([item.title, phrases.layout_words(layout), step, tokens, memory, verdict(item, report.best)])
    columns = ["name.", "layout.", "step", "tokens/s per device", "memory", "verdict."]
    return table("Standard layouts compared with the chosen one.", columns, rows)


def _rules(report: Report) -> str:
    """Return the table of the rules of thumb that mislead."""
    rows = [
        [
            phrases.capital(rule.name),
            *rule.texts,
            phrases.capital(f"{rule.why}{f' ({rule.where})' if rule.where else ''}."),
        ]
        for rule in misleading(report)
    ]
    caption = "Rules of thumb that are more than 20% off for this job."
    return table(caption, ["rule.", "by the rule", "estimated", "reason."], rows)
