"""Tables, figures and pages made of results, and where the results come from."""

from kvfold.report.page import render_demo, save_report
from kvfold.report.provenance import provenance

__all__ = ["provenance", "render_demo", "save_report"]
