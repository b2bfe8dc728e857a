"""Contradictions between the sentences of a report, found by parsing them: no sentence is built here a second time."""

from __future__ import annotations

import io
import re
from itertools import pairwise

from rich.console import Console

from kumi.plan.search.ranking import TIE_TOLERANCE, expected_seconds
from kumi.report.advice import advice, same_sharding, verdict
from kumi.report.bottleneck import bottlenecks, levers
from kumi.report.brief import brief, title
from kumi.report.quantities import traffic
from kumi.report.rules_of_thumb import misleading
from kumi.report.summary import headline
from kumi.report.terminal import render_brief, render_report, rule_text
from kumi.units import parse_bytes

SIZE = r"([\d.]+ (?:B|KiB|MiB|GiB|TiB))"
TIME = r"([\d.]+ m?s)"
# A figure has three digits, so that it is off by up to half a per cent, and the bounds of two such by a per cent.
ROUNDED = 0.011


def as_seconds(text):
    value, unit = text.split()
    return float(value) / (1000 if unit == "ms" else 1)


def printed(renderable):
    file = io.StringIO()
    Console(file=file, width=4000, highlight=False).print(renderable)
    return file.getvalue()


def close(first, second):
    return abs(first - second) <= ROUNDED * max(abs(first), abs(second)) + 1e-9


class Sentences:
    """All sentences of `report`, with the lines of the brief by label."""

    def __init__(self, report):
        self.report = report
        self.lines = {line.label: line.text for line in brief(report) if line.label}
        self.why = [*bottlenecks(report), *advice(report)]
        self.verdicts = [(item, verdict(item, report.best)) for item in report.expected]
        self.rules = [rule_text(rule) for rule in misleading(report)]
        self.head = headline(report)
        self.levers = {lever.what for lever in levers(report)}
        self.all = [title(report.job), *(line.text for line in brief(report)), *self.head, *self.why]
        self.all += [*(text for _, text in self.verdicts), *self.rules]
        self.printed = printed(render_brief(report)) + printed(render_report(report))


def contradictions(report):
    """Return what is wrong in the sentences of `report`, as texts; empty if they agree with each other."""
    texts = Sentences(report)
    checks = (
        _names,
        _shares,
        _memory,
        _fits,
        _standard,
        _order,
        _intervals,
        _limits,
        _counts,
        _nodes,
        _cost,
        _advice,
        _speeds,
    )
    return [f"{check.__name__}: {wrong}" for check in checks for wrong in check(texts)]


def _names(texts):
    """The model has the user's name, and nothing unused is assumed."""
    name = texts.report.job.model_name
    if name and not texts.all[0].startswith(name):
        yield f"the model is {name}: {texts.all[0]}"
    yield from (
        f"a class name: {text}" for text in texts.all if re.search(r"For(CausalLM|ConditionalGeneration)", text)
    )
    assumed = " ".join(text for text in (texts.lines.get("assumed", ""), *texts.head) if "host." in text)
    if assumed and "offloaded" not in texts.lines["layout"]:
        yield f"assumed without offloading: {assumed}"
    for text in texts.all:
        if re.search(r"\bNone\b(?! of)|\bnan\b|\binf\b|  |\[\]|with  and", text):
            yield f"an empty value: {text}"
    for text in (*(line for line in texts.lines.values()), *texts.why):
        if text not in texts.printed:
            yield f"not printed as it is: {text}"


def _shares(texts):
    """Shares of a whole are at most 100%; the kinds of time make up the step."""
    for text in texts.all:
        for share in re.findall(r"([\d.]+)% of the (?:step|time)", text):
            if float(share) > 100:
                yield f"more than all of it: {text}"
        for share in re.findall(r"probability (?:over |under )?([\d.]+)%", text):
            if not 0 < float(share) < 100:
                yield f"certain: {text}"
        if re.search(r"(?<![\w)-])-[\d.]+ ?(%|s\b|ms\b|GiB)", text):
            yield f"a negative difference: {text}"
    total = sum(value for _, value in texts.report.best.time)
    if not close(total, texts.report.best.step_seconds):
        yield f"kinds of time add up to {total}, not {texts.report.best.step_seconds}"


def _memory(texts):
    """The memory line adds up, and agrees with the sentence on memory and with the headline."""
    text = texts.lines["memory"]
    used, device = map(parse_bytes, re.match(f"{SIZE} of {SIZE}", text).groups())
    fits = "DOES NOT FIT" not in text
    if fits:
        spare, margin = map(parse_bytes, re.search(f"fits, {SIZE} spare \\({SIZE} of it the margin\\)", text).groups())
        if abs(used + spare - device) > ROUNDED * device or margin > spare + ROUNDED * device:
            yield f"sizes: {text}"
    elif texts.report.best.fits:
        yield f"it fits: {text}"
    (sentence,) = [line for line in texts.why if line.startswith("Memory ")]
    share = float(re.search(r"usable \(([\d.]+)%\)", sentence)[1])
    need, usable = map(parse_bytes, re.search(f"needs {SIZE} of the {SIZE} usable", sentence).groups())
    if abs(100 * need / usable - share) > 2:
        yield f"share: {sentence}"
    full = sentence.startswith(("Memory is nearly full", "Memory is too small"))
    # 90% may be a rounded 89.9%.
    if (full != (share >= 90) and abs(share - 90) > 0.5) or (share > 100) != (not fits):
        yield f"{share}% full: {sentence}"
    faster = [line for line in texts.why if re.search("more memory per device, ", line)]
    if bool(faster) != texts.lines["more memory"].startswith("with "):
        yield f"more memory: {faster} and {texts.lines['more memory']}"
    if sentence.startswith("Memory is not a limit") and faster:
        yield f"{sentence} But {faster}"
    if sentence.startswith("Memory has room") and not faster:
        yield f"no faster layout is named: {sentence}"
    for line in faster:
        then, now = re.search(f"would take {TIME} per step instead of {TIME}", line).groups()
        if as_seconds(then) >= as_seconds(now):
            yield f"no gain: {line}"


def _fits(texts):
    """A layout fits in one sentence if it fits in all."""
    for item, text in texts.verdicts:
        if ("Does not fit" in text) != (item.estimate is not None and not item.fits):
            yield f"{item.title}: {text}"
        match = re.search(r"([\d.]+)x the usable memory", text)
        if match and float(match[1]) <= 1.0:
            yield f"{item.title} needs no more than there is: {text}"
    replica = " ".join(line for line in texts.why if line.startswith("A full replica"))
    for item, text in texts.verdicts:
        if item.title.startswith(("DDP", "No offload")) and "fits on one device" in replica and "Does not fit" in text:
            yield f"{replica} But {item.title}: {text}"
        if item.title.startswith(("DDP", "No offload")) and "must be" in replica and item.fits:
            yield f"{replica} But {item.title}: {text}"


def _standard(texts):
    """Whether a standard layout can run agrees with its verdict; the chosen one is called chosen."""
    runs = [item.title for item, text in texts.verdicts if not re.search("Refused|Does not fit|not supported", text)]
    for line in texts.why:
        if line.startswith("None of the standard layouts") and runs:
            yield f"{line} But {runs}"
        if match := re.match(r"The choice is a standard layout: (.*)\.", line):
            item, text = next(pair for pair in texts.verdicts if pair[0].title == match[1])
            if not text.startswith("The chosen layout"):
                yield f"{line} But {item.title}: {text}"
        if "would take" in line and "pinned fields" in line and not texts.report.pinned:
            yield f"nothing is pinned: {line}"
    job, best = texts.report.job, texts.report.best
    for item, text in texts.verdicts:
        if "pinned fields" in text and not texts.report.pinned:
            yield f"nothing is pinned: {item.title}: {text}"
        if "needs nothing" in text:
            yield f"{item.title}: {text}"
        match = re.match(r"([\d.]+)x the time(.*)", text)
        if match and float(match[1]) < 1 and "needs" in match[2]:
            yield f"{item.title} is faster: {text}"
        if text.startswith("The chosen layout") and not same_sharding(item.layout, texts.report.best.layout):
            yield f"{item.title} is not the chosen layout"
        # A layout may be faster by less than the error: other layouts stand for it in the search.
        free = item.fits and not item.problems and not texts.report.pinned and "within the model's error" not in text
        if free and (1 + TIE_TOLERANCE) * expected_seconds(job, item.estimate) < expected_seconds(job, best):
            yield f"{item.title} is faster than the choice: {text}"


def _order(texts):
    """The best is first: the fastest, or the simplest of those that tie with it."""
    best, others = texts.report.best, texts.report.others
    times = [other.step_seconds for other in others]
    if times != sorted(times):
        yield "runners-up are not in order"
    expected = [expected_seconds(texts.report.job, plan) for plan in (best, *others)]
    if expected[0] > (1 + TIE_TOLERANCE) * 1.001 * min(expected):
        yield f"a runner-up is expected to take {min(expected)}, the choice {expected[0]}"
    fastest = re.search("; the fastest among", texts.lines["layout"])
    if fastest and times and times[0] < best.step_seconds:
        yield f"not the fastest: {texts.lines['layout']} But {texts.lines['runner-up']}"
    if match := re.search(f"{TIME} per step \\(([\\d.]+)% (longer|shorter)", texts.lines["runner-up"]):
        mine = as_seconds(re.match(TIME, texts.lines["time"])[1])
        theirs, share = as_seconds(match[1]), float(match[2]) / 100 * (1 if match[3] == "longer" else -1)
        if abs(theirs / mine - 1 - share) > ROUNDED:
            yield f"{texts.lines['time']} But {texts.lines['runner-up']}"
    if any(not other.fits for other in others) or any(item.fits for item in texts.report.lacking):
        yield "a runner-up does not fit, or what is too large does"
    layouts = [best.layout, *(other.layout for other in others)]
    if len(set(layouts)) < len(layouts):
        yield "a layout is listed twice"


def _intervals(texts):
    """Bounds are in order, contain the estimate, and the wider interval contains the narrower one."""
    errors = texts.report.uncertainty
    estimates = (
        (errors.time80, errors.time90, texts.report.best.step_seconds),
        (errors.memory80, errors.memory90, None),
    )
    for narrow, wide, value in estimates:
        bounds = (wide.low, narrow.low, narrow.high, wide.high)
        if any(low > high for low, high in pairwise(bounds)) or (value and not narrow.low <= value <= narrow.high):
            yield f"bounds {bounds} of {value}"
    if errors.extrapolated and "less sure" not in texts.printed:
        yield f"not told: {errors.extrapolated}"
    margin = re.search(r"probability (over |under )?([\d.]+)%", texts.lines["memory"])
    if margin and abs(float(margin[2]) - 100 * errors.fits) > 1:
        yield f"{texts.lines['memory']}: {errors.fits}"


def _limits(texts):
    """The limit is named by its share."""
    text = texts.lines["limit"]
    compute = float(re.search(r"forward and backward (?:take|together) \(?([\d.]+)%", text)[1])
    other = re.search(r"largest other part is [^:]*: [\d.]+ m?s, ([\d.]+)%", text)
    if text.startswith("Compute-bound") and compute < 49.5:
        yield text
    if text.startswith("No single bottleneck") and compute > 50.5:
        yield text
    if other and float(other[1]) > compute + 1:
        yield f"the other part is larger: {text}"
    if other and compute + float(other[1]) > 101:
        yield f"more than all of it: {text}"
    if "is the bottleneck" in text and float(re.search(r"step \(([\d.]+)%\)", text)[1]) < compute - 1:
        yield text
    recompute = "enough memory to recompute nothing" in texts.levers
    if recompute and "recompute" not in texts.lines["layout"]:
        yield f"nothing is recomputed: {texts.lines['layout']}"


def _counts(texts):
    """As many fit as are legal at most, and what is pinned has no runner-up."""
    report = texts.report
    if not 1 <= report.fitting <= report.searched:
        yield f"{report.fitting} of {report.searched} fit"
    if "the only legal one" in texts.lines["layout"] and (report.others or report.searched > 1):
        yield f"{texts.lines['layout']} But {texts.lines['runner-up']}"
    if texts.lines["runner-up"].endswith("no other layout fits") and report.fitting > 1:
        yield f"{report.fitting} fit: {texts.lines['runner-up']}"
    if texts.lines["runner-up"].startswith("none") != (not report.others):
        yield texts.lines["runner-up"]
    tokens = report.best.layout.dp * report.best.layout.microbatch * report.job.batch.seq_len
    if report.best.tokens_per_step % tokens:
        yield f"{report.best.tokens_per_step} tokens in microbatches of {tokens}"


def _nodes(texts):
    """Speeds on other numbers of nodes are those of their times, and more nodes than given are not called fewer."""
    text = texts.lines.get("nodes", "")
    mine = as_seconds(re.match(TIME, texts.lines["time"])[1])
    for nodes, seconds, factor in re.findall(rf"([\d,]+) nodes?: {TIME} \(([\d.]+)x the speed\)", text):
        if abs(mine / as_seconds(seconds) - float(factor)) > 0.02 * float(factor) + 0.006:
            yield f"{nodes}: {text}"
        if nodes.replace(",", "") == str(texts.report.job.cluster.nodes):
            yield f"the given number: {text}"


def _cost(texts):
    """Days, hours and money are those of the same tokens, and inside of their bounds."""
    text, best, cluster = texts.lines["cost"], texts.report.best, texts.report.job.cluster
    match = re.search(r"tokens take ([\d.,]+) (days|hours) \(([\d.,]+) to ([\d.,]+)\), ([\d.,]+) device hours", text)
    value, low, high, total = (float(match[at].replace(",", "")) for at in (1, 3, 4, 5))
    hours = value * (24 if match[2] == "days" else 1)
    if not close(hours * cluster.devices, total):
        yield f"{cluster.devices} devices: {text}"
    if not low <= value <= high:
        yield f"bounds: {text}"
    tokens = texts.report.training.tokens if texts.report.training else 1e9
    if not close(hours * 3600 * best.tokens_per_second, tokens):
        yield f"{best.tokens_per_second} tokens/s: {text}"
    cost = re.search(r"cost ([\d.,]+) \(([\d.,]+) to ([\d.,]+)\) at ([\d.]+)", text)
    if cost and not close(float(cost[1].replace(",", "")), total * float(cost[4])):
        yield f"cost: {text}"


def _advice(texts):
    """What to try next is possible, and the command trains what kumi can train."""
    following, training = texts.lines["next"], texts.lines["train"]
    if "runner-up" in following and texts.lines["runner-up"].startswith("none"):
        yield f"{following} But {texts.lines['runner-up']}"
    if "runner-up" in following and "less than the estimate's error" not in texts.lines["runner-up"]:
        yield f"{following} But {texts.lines['runner-up']}"
    cannot = any("can plan this layout but not train it" in line for line in texts.why)
    if texts.report.job.engine.name == "kumi" and cannot != training.startswith("kumi cannot"):
        yield f"{training} But {[line for line in texts.why if 'not train it' in line]}"
    for line in (line for line in texts.why if "network is" in line):
        share = re.search(r"wait for communication for ([\d.]+)%", line)
        if share and (float(share[1]) > 10.5) != ("network is slow" in line) and not 9.5 < float(share[1]) < 10.5:
            yield line


def _speeds(texts):
    """Nothing is faster than its data sheet, and no saving is larger than the step."""
    report = texts.report
    for row in traffic(report.job, report.best):
        if row.bandwidth and row.busy and row.sent / row.busy > 1.001 * row.bandwidth:
            yield f"{row.name}: {row.sent / row.busy:.3g} bytes/s of {row.bandwidth:.3g}"
        if row.exposed > row.busy * 1.001:
            yield f"{row.name}: {row.exposed} s of {row.busy} s are exposed"
    if not 0 < report.best.mfu < 1:
        yield f"MFU {report.best.mfu}"
    for lever in levers(report):
        if lever.seconds >= report.best.step_seconds:
            yield f"{lever.what} saves {lever.seconds} s of {report.best.step_seconds} s"
