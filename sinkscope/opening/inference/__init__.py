"""An adapter inferred from a few passes through a model, and proved by edits, rows and sums."""
