"""The drawing of the circuit of a sink."""
