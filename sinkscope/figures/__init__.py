"""Drawings with plotly; nothing is measured here, and what is drawn is a result with plain fields."""
