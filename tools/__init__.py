"""What developers of sinkscope run: nothing of the package or of its figures needs these."""
