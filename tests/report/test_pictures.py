import itertools
import math
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from examples import CHOSEN, best, copies, estimate, job, memory, one_device, report, sharded, timeline
from random_requests import random_reports

from kumi.plan.estimates import MemoryEstimate
from kumi.plan.report import Report
from kumi.report import palette, pipeline_picture, scatter, svg
from kumi.report.pictures import pictures
from kumi.spec.layout import Layout

SVG = "{http://www.w3.org/2000/svg}"


def full():
    return replace(report(), timeline=timeline())


def v_shaped():
    return replace(report(), timeline=timeline(8, "dualpipe", 2))


def parsed(made):
    return {name: ElementTree.fromstring(drawn) for name, drawn in pictures(made).items()}


def extent(text):
    """Left and right end of a text element, by how wide its letters are."""
    width = svg.width_of(text.text, float(text.get("font-size")), bold=text.get("font-weight") == "600")
    x = float(text.get("x"))
    return {"start": (x, x + width), "middle": (x - width / 2, x + width / 2), "end": (x - width, x)}[
        text.get("text-anchor")
    ]


def test_each_part_of_a_report_has_its_picture():
    assert list(pictures(full())) == ["memory", "time", "timeline", "timeline-start", "traffic", "expected", "choices"]
    alone = estimate(Layout(), {"forward": 1.0, "backward": 2.0}, (memory(params=10),))
    assert list(pictures(Report(one_device(), alone))) == ["memory", "time"]


def test_pictures_are_well_formed_and_say_what_they_show():
    for name, root in parsed(full()).items():
        ids = {element.get("id"): element for element in root.iter() if element.get("id")}
        assert [ids[part].tag for part in root.get("aria-labelledby").split()] == [f"{SVG}title", f"{SVG}desc"]
        assert all(len(ids[part].text) > 10 for part in root.get("aria-labelledby").split())
        assert root.get("role") == "img"
        assert all(key.startswith(name) for key in ids)


@pytest.mark.parametrize(
    "made", [full(), v_shaped(), Report(job(), copies()), Report(job(), sharded(), others=(copies(),))]
)
def test_nothing_is_written_or_drawn_outside_of_the_picture(made):
    for root in parsed(made).values():
        _, _, width, height = map(float, root.get("viewBox").split())
        for text in root.iter(f"{SVG}text"):
            left, right = extent(text)
            assert left >= 0, text.text
            assert right <= width + 1, text.text
            assert 8 <= float(text.get("y")) <= height, text.text
            assert float(text.get("font-size")) >= 10
        for rect in root.iter(f"{SVG}rect"):
            if "%" not in rect.get("width"):
                assert float(rect.get("x")) + float(rect.get("width")) <= width + 0.5
                assert float(rect.get("y")) + float(rect.get("height")) <= height


def box(text):
    """Left, top, right and bottom of a text, with the heights of its letters above and below the baseline."""
    (left, right), y, size = extent(text), float(text.get("y")), float(text.get("font-size"))
    return left, y - 0.73 * size, right, y + 0.2 * size


def overlaps(root):
    """Pairs of texts that cover a part of each other."""
    texts = [(text.text, box(text)) for text in root.iter(f"{SVG}text")]
    return [
        (first, second)
        for (first, a), (second, b) in itertools.combinations(texts, 2)
        if min(a[2], b[2]) - max(a[0], b[0]) > 0.5 and min(a[3], b[3]) - max(a[1], b[1]) > 0.5
    ]


@pytest.mark.parametrize(
    "made",
    [full(), v_shaped(), replace(full(), best=copies(), job=job()), Report(job(), sharded(), others=(copies(),))],
)
def test_no_two_texts_lie_over_each_other(made):
    assert {name: overlaps(root) for name, root in parsed(made).items() if overlaps(root)} == {}


@pytest.mark.parametrize(
    "first",
    [pytest.param(seed, marks=[pytest.mark.exhaustive] * (seed > 70_000)) for seed in range(70_000, 95_000, 1000)],
)
def test_pictures_of_random_plans_have_no_overlaps_and_nothing_outside(first):
    for name, made in random_reports(first, 4):
        for picture, root in parsed(made).items():
            _, _, width, height = map(float, root.get("viewBox").split())
            boxes = {text.text: box(text) for text in root.iter(f"{SVG}text")}
            outside = [
                text
                for text, (left, top, right, low) in boxes.items()
                if min(left, top, width - right, height - low) < -1
            ]
            assert (picture, overlaps(root), outside) == (picture, [], []), name


def test_an_overlap_is_noticed():
    texts = [svg.text(10, 20, "first"), svg.text(30, 24, "second"), svg.text(10, 60, "third")]
    assert overlaps(ElementTree.fromstring(svg.picture("x", "A title", "About it", 80, texts))) == [("first", "second")]


def test_bars_of_memory_are_as_long_as_their_bytes():
    root = parsed(report())["memory"]
    bars = [
        (rect, rect.find(f"{SVG}title").text)
        for rect in root.iter(f"{SVG}rect")
        if rect.find(f"{SVG}title") is not None
    ]
    widths = {said: float(rect.get("width")) for rect, said in reversed(bars)}
    assert widths["activations: 24 GiB"] == pytest.approx(6 * widths["parameters: 4 GiB"], rel=1e-3)
    assert widths["optimizer states: 12 GiB"] == pytest.approx(3 * widths["parameters: 4 GiB"], rel=1e-3)


def test_every_kind_of_memory_can_be_told_from_every_other_without_its_colour_alone():
    looks = {(palette.MEMORY_COLOURS[kind], kind in palette.HATCHED) for kind in MemoryEstimate.__dataclass_fields__}
    assert len(looks) == len(MemoryEstimate.__dataclass_fields__)


def test_the_timeline_has_a_box_for_every_action():
    picture = timeline(8)
    root = ElementTree.fromstring(pipeline_picture.draw_timeline(picture, "timeline", picture.seconds))
    hints = [title.text for rect in root.iter(f"{SVG}rect") for title in rect.iter(f"{SVG}title")]
    assert len(hints) == 4 * 2 * 8
    assert "forward, stage 3, microbatch 7" in hints


def test_a_long_timeline_is_cut_and_that_is_said():
    picture = timeline(700)
    drawn = pipeline_picture.draw_timelines(picture)
    assert len(re.findall(r"<title>(?:forward|backward)", drawn["timeline"])) <= 1.1 * pipeline_picture.SPANS
    assert "; the first " in drawn["timeline"]
    assert "; the first " in drawn["timeline-start"]


def test_marks_of_layouts_that_coincide_stand_apart():
    """Each has a number of its own, and a line to its position."""
    same = replace(report(), expected=(), front=(), lacking=())
    twins = tuple(replace(best(), layout=replace(CHOSEN, microbatch=size)) for size in (2, 4, 8))
    texts = [text.text for text in parsed(replace(same, others=twins))["choices"].iter(f"{SVG}text")]
    assert {"1", "2", "3", "4"} <= set(texts)
    drawn = scatter._apart([(100.0, 100.0)] * 4 + [(104.0, 97.0), (300.0, 100.0)])
    assert drawn[0] == (100.0, 100.0)
    assert drawn[5] == (300.0, 100.0)
    apart = [math.hypot(a[0] - b[0], a[1] - b[1]) for a, b in itertools.combinations(drawn, 2)]
    assert min(apart) >= scatter.MARKER_DISTANCE - 1e-9


def test_long_names_of_layouts_take_several_lines():
    long = replace(CHOSEN, stage_layers=(20,) * 4, recompute_layers=7, offload="states")
    root = parsed(replace(report(), others=(replace(best(), layout=long),)))["choices"]
    for text in root.iter(f"{SVG}text"):
        assert extent(text)[1] <= svg.WIDTH
    assert any(text.text.endswith("states") or text.text.endswith("offloaded") for text in root.iter(f"{SVG}text"))


def test_numbers_of_layouts_do_not_hide_each_other():
    texts = [text for text in parsed(full())["choices"].iter(f"{SVG}text") if text.get("font-size") == "11.5"]
    places = [(float(text.get("x")), float(text.get("y"))) for text in texts]
    assert len(places) >= 4
    for index, (x, y) in enumerate(places):
        assert all(abs(x - other[0]) > 6 or abs(y - other[1]) > 6 for other in places[index + 1 :])


@pytest.mark.parametrize(
    ("most", "expected"), [(80, [0, 20, 40, 60, 80]), (7.3, [0, 2, 4, 6]), (0.05, [0, 0.01, 0.02, 0.03, 0.04, 0.05])]
)
def test_ticks_are_round(most, expected):
    assert svg.ticks(most) == pytest.approx(expected)


def test_ink_on_a_colour_is_what_reads_better():
    assert svg.contrasting(palette.YELLOW) == "#000000"
    assert svg.contrasting(palette.BLUE) == "#ffffff"


def test_names_are_escaped():
    made = report()
    device = replace(made.job.cluster.device, name="<b>&")
    links = tuple(replace(link, name="a<b") for link in made.job.cluster.links)
    cluster = replace(made.job.cluster, device=device, links=links)
    collectives = tuple(replace(item, link="a<b") for item in made.best.collectives)
    odd = replace(made, job=replace(made.job, cluster=cluster), best=replace(made.best, collectives=collectives))
    assert "tp over a<b" in [text.text for text in parsed(odd)["traffic"].iter(f"{SVG}text")]


def test_the_unit_of_the_memory_axis_stands_above_its_numbers():
    across, up = (
        scatter.Scale(1.0, 2.0, 66, 700),
        scatter.Scale(10.0, 120.0, 366, 54),
    )  # the highest number lies at the very top
    texts = [
        re.search(r'y="([\d.]+)".*>(.+)</text>', mark)
        for mark in scatter._frame(across, up)
        if 'text-anchor="end"' in mark
    ]
    heights = {match[2]: float(match[1]) for match in texts}
    unit = heights.pop("GiB")
    assert heights
    assert all(height - unit >= 13 for height in heights.values())


def test_pictures_turn_dark_with_the_reader_s_screen():
    drawn = svg.picture("x", "A title", "About it", 10, [svg.rect(0, 0, 5, 5, palette.BLUE, apart=True)])
    (rules,) = [node.text for node in ElementTree.fromstring(drawn).iter(f"{SVG}style")]
    assert rules.startswith("@media screen and (prefers-color-scheme:dark){")
    assert f"svg{{color:{svg.DARK_INK}}}" in rules
    assert f".paper{{fill:{svg.DARK_PAPER}}}" in rules
    assert 'class="paper"' in drawn
