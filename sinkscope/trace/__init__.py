"""Run a model once and stream what is requested: sites, reducers, observers, attention rows in query chunks."""

from sinkscope.tap.observers import attention_rows
from sinkscope.trace.run import Observer, trace
from sinkscope.trace.sites import site_names

__all__ = ["Observer", "attention_rows", "site_names", "trace"]
