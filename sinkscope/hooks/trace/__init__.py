"""Run a model once and stream what is requested: sites, reducers, attention rows in query chunks."""

from sinkscope.hooks.trace.run import trace
from sinkscope.hooks.trace.sites import site_names
from sinkscope.tap.observers import attention_rows

__all__ = ["attention_rows", "site_names", "trace"]
