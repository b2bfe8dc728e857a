"""What a run is going to do, before it does it: as data, and as tables and pictures for a terminal.

describe(run)         -> plain data; its "placement" comes from placement(layout, cluster)
render(data)          -> that data as a table
render_placement(...) -> where ranks stand, drawn
render_data(...)      -> the sources of a run's data
"""

from kumi.describe.placement import placement, render_placement
from kumi.describe.tables import console, describe, render, render_data, show

__all__ = ["console", "describe", "placement", "render", "render_data", "render_placement", "show"]
