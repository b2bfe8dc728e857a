"""What a run is going to do, before it does it: as data, and as tables and pictures for a terminal.

described(path)       -> plain data of what a run file describes, the placement of its ranks included
describe(run)         -> the same of what it resolved to
estimated(path)       -> the job of a run file, and the estimate of the layout it is trained with
render(data)          -> that data as a table
render_placement(...) -> where ranks stand, drawn
render_data(...)      -> the sources of a run's data
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
