"""The tasks of the benchmark, a file each."""
