"""Every table and figure of the papers, by a command: our figures next to the paper's, one module per paper.

A module has the settings, the paper's figures, and the paper's claims about them. What modules share is in `common`,
`timing` and `report`, and in the benchmarks that they call.
"""
