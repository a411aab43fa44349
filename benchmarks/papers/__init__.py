"""Every table and figure of the papers by a command, ours beside the paper's: one module a paper.

A module describes: the settings, the paper's figures, and what the paper claims of them. Training, timing, records,
claims and drawing are in `common`, and in the benchmarks that a module calls.
"""
