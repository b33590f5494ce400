"""A set of texts with known truth: 22 classes of loops and 9 of honest repetition, half of it for choosing rules."""
