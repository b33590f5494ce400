"""Generation under interventions, and the loop monitor as a logits processor."""
