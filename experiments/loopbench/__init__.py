"""What LoopBench ships, made by a script of its own."""
