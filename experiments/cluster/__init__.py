"""Scans of several models on a cluster: a script for Ray, one for submitit, and an array of Slurm."""
