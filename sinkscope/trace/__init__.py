"""Run a model once and stream what is requested: sites, reducers, observers, attention rows in query chunks."""

from sinkscope.trace.attention import attention_rows
from sinkscope.trace.run import Observer, site_names, trace

__all__ = ["Observer", "attention_rows", "site_names", "trace"]
