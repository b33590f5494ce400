"""Benchmarks: prompts built by a rule, methods run on them, tables beside those of the papers."""
