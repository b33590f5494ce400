"""Short passes over a model."""
