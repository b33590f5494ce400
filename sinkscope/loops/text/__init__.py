"""Loops in plain texts and token ids: signals, the online monitor, and a checker. Loads no torch."""
