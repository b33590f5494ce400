"""Clusters of tokens that one head marks, and the attack that they make possible."""
