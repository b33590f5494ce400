"""Two real language models: where they come from."""
