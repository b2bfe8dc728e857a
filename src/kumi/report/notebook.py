"""A report that a notebook shows as a page."""

from __future__ import annotations

from html import escape

from kumi.report.page import page
from kumi.report.report import Report


class NotebookReport(Report):
    """A report whose last line in a notebook's cell shows the page of `kumi plan --html`."""

    def _repr_html_(self) -> str:
        """Return the page in a frame, which keeps its style to itself."""
        return f'<iframe srcdoc="{escape(page(self))}" style="width: 100%; height: 40rem; border: 0"></iframe>'
