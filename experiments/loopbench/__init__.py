"""Scripts that make LoopBench's texts in the package."""
