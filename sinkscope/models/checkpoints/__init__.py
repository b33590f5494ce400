"""Checkpoints: their names, the hub, and layers that are read one by one."""
