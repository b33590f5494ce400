"""What makes the sink at the first token: the layer, its neurons, and the heads that mark the token."""
