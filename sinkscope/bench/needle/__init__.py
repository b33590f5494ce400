"""Retrieval over depth and length of a prompt, by method."""
