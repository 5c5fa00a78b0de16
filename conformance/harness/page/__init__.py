"""The report as one HTML page that asks for nothing from elsewhere and is complete without its script."""

from conformance.harness.page.badge import to_badge
from conformance.harness.page.page import to_html
from conformance.harness.page.sources import Sources, read_sources

__all__ = ["Sources", "read_sources", "to_badge", "to_html"]
