"""A report that displays itself as an HTML page in a notebook."""

from __future__ import annotations

from html import escape

from kumi.report.page import page
from kumi.report.report import Report


class NotebookReport(Report):
    """A report that a notebook displays as the page of `kumi plan --html`."""

    def _repr_html_(self) -> str:
        """Return the page in an iframe, so that its style does not affect the notebook."""
        return f'<iframe srcdoc="{escape(page(self))}" style="width: 100%; height: 40rem; border: 0"></iframe>'
