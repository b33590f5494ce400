"""All results of a folder as one HTML file."""

from sinkscope.report.build import Report, Skipped, report

__all__ = ["Report", "Skipped", "report"]
