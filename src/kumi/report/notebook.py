"""A report that displays itself as an HTML page in a notebook."""

from __future__ import annotations

from html import escape

from kumi.plan.report import Report
from kumi.report.page import page
from kumi.report.phrases import layout_words


class NotebookReport(Report):
    """A report that a notebook displays as the page of `kumi plan --html`."""

    def __repr__(self) -> str:
        return (
            f"Report({self.job.model_name or self.job.model.family} on {self.job.cluster.devices} x "
            f"{self.job.cluster.device.name}: "
            f"{layout_words(self.best.layout)}; {self.best.step_seconds:.3g} s per step; {self.fitting} layouts fit)"
        )

    def _repr_html_(self) -> str:
        """Return the page in an iframe, so that its style does not affect the notebook."""
        return f'<iframe srcdoc="{escape(page(self))}" style="width: 100%; height: 40rem; border: 0"></iframe>'
