"""Short passes over a model, and what has to hold while hooks are on it."""
