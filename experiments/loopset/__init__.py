"""A set of texts with known truth, loops and honest repetition, and the comparison of detectors on it."""
