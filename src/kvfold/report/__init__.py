"""Tables, figures and pages made of results."""

from kvfold.report.page import render_demo, save_report

__all__ = ["render_demo", "save_report"]
