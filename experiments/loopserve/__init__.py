"""Tables and figures of LoopServe (Li et al. 2025)."""
