"""Benchmarks: prompts built by a rule, methods run on them, and tables that include the papers' numbers."""

from __future__ import annotations

from sinkscope.bench import tasks as tasks  # which registers them
