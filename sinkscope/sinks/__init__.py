"""Where a model makes its attention sink: find it, prove it."""
