"""Run a model once and stream what is requested: sites, reducers, observers, attention rows in query chunks."""

from sinkscope.hooks.trace.run import Observer, trace
from sinkscope.hooks.trace.sites import site_names
from sinkscope.tap.observers import attention_rows

__all__ = ["Observer", "attention_rows", "site_names", "trace"]
