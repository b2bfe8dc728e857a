import re
from dataclasses import replace
from html.parser import HTMLParser

from examples import estimate, memory, one_device, report, timeline

from kumi.plan.report import Report
from kumi.report.page import page, table
from kumi.spec.layout import Layout

VOID = {"meta", "br", "hr", "img", "link", "input"}


class Outline(HTMLParser):
    """A parser that checks that tags nest, and stores ids, attributes and text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.attributes, self.tags, self.said = [], [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *pair) for pair in attrs]
        self.ids += [value for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.said.append(data)


def full():
    return replace(report(), timeline=timeline())


def test_tags_nest_and_ids_are_unique():
    outline = Outline(page(full()))
    assert outline.open == []
    assert len(outline.ids) == len(set(outline.ids))
    assert outline.tags.count("svg") == outline.tags.count("figure") == 7


def test_it_needs_nothing_from_anywhere():
    text = page(full())
    outline = Outline(text)
    assert not {"script", "link", "img", "iframe", "object"} & set(outline.tags)
    assert not [pair for pair in outline.attributes if pair[1] in ("src", "href", "style") or pair[1].startswith("on")]
    assert set(re.findall(r"https?://[^\s\"<]+", text)) == {"http://www.w3.org/2000/svg"}
    assert set(re.findall(r"url\(([^)]*)\)", text)) <= {f"#{one}" for one in outline.ids}


def test_references_inside_of_it_are_met():
    outline = Outline(page(full()))
    for _, name, value in outline.attributes:
        if name == "aria-labelledby":
            assert set(value.split()) <= set(outline.ids)


def test_every_figure_of_the_report_is_in_a_table_as_well():
    text = " ".join(Outline(page(full())).said)
    for figure in (
        "pp = 4",
        "55.00",
        "pipeline bubble",
        "1.50 s",
        "573 GB",
        "reduce_scatter",
        "within the model's error",
        "TP 8 x PP 2 (1f1b) x ZeRO-1 over 4",
        "Refused: tp=16 does not divide 8 heads; use 8.",
        "60-79",
        "Tensor parallelism sends one all-reduce per layer",
    ):
        assert figure in text


def test_tables_name_their_rows_and_columns():
    outline = Outline(table("What", ["name.", "figure"], [["a<b", "1"], ["c", "2"]]))
    assert outline.tags.count("th") == 4
    assert outline.tags.count("caption") == 1
    assert "a<b" in outline.said
    assert ("td", "class", "n") in outline.attributes


def test_a_plan_for_one_device_is_a_short_page():
    alone = estimate(Layout(), {"forward": 1.0, "backward": 2.0}, (memory(params=10),))
    outline = Outline(page(Report(one_device(), alone)))
    assert outline.tags.count("svg") == 2
    assert "Communication" not in outline.said


def test_it_is_the_same_every_time():
    assert page(full()) == page(full())
