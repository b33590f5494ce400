"""Scripts for machines with a GPU: each runs unattended by one command and writes one JSON."""
