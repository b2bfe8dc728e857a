from dataclasses import fields, replace

import numpy as np
import pytest

from kumi.plan.layout_batch import COLUMN_NAMES, batch_layouts
from kumi.spec.layout import Layout

LAYOUTS = [
    Layout(),
    Layout(pp=4, schedule="zb-v", stages=2, recompute="full", recompute_layers=0, offload="states", context="ulysses"),
    Layout(tp=2, sequence_parallel=False, recompute="selective", recompute_layers=3, tiles=4),
]


def test_columns_are_the_fields_of_a_layout_and_rows_give_layouts_back():
    batch = batch_layouts(LAYOUTS)
    assert {*COLUMN_NAMES, "stage_layers"} == {field.name for field in fields(Layout)}
    assert [batch.row(index) for index in range(len(batch))] == LAYOUTS


def test_a_replaced_column_changes_that_field_only():
    batch = batch_layouts(LAYOUTS).replaced(ep=np.array([1, 2, 4]))
    assert [batch.row(index) for index in range(3)] == [
        replace(layout, ep=ep) for layout, ep in zip(LAYOUTS, (1, 2, 4))
    ]
    with pytest.raises(TypeError, match="epp"):
        batch.replaced(epp=batch.ep)


@pytest.mark.parametrize("words", [("zb-v",), ("1f1b", "zb-v"), ()])
def test_one_of_says_of_each_row_what_it_says_of_its_layout(words):
    assert batch_layouts(LAYOUTS).one_of("schedule", words).tolist() == [
        layout.one_of("schedule", words) for layout in LAYOUTS
    ]
