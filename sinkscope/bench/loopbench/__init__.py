"""LoopBench-DC and LoopBench-RI (Xu et al. 2026, section 4): prompts that make decoding loop, and who escapes.

Not the benchmark of circular reasoning that is also called LoopBench.
"""
