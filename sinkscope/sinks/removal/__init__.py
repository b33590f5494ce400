"""What removing components of a model does to one position of a text."""
