"""The description of a run before it starts, as plain data and as tables for the terminal.

described(path)       -> the description of a run file: model, layout, placement of ranks, batch, memory
describe(run)         -> the description of a resolved run
estimated(path)       -> the job of a run file, and the estimate of its layout
render(data)          -> a description as a table
render_placement(...) -> a drawing of the ranks on their nodes
render_data(...)      -> tables of the sources of a run's data
"""

from kumi.describe.placement import placement, render_placement
from kumi.describe.tables import console, describe, described, estimated, render, render_data, show

__all__ = [
    "console",
    "describe",
    "described",
    "estimated",
    "placement",
    "render",
    "render_data",
    "render_placement",
    "show",
]
