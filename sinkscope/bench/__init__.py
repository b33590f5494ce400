"""Benchmarks: prompts built by a rule, methods run on them, and tables that include the papers' numbers."""
