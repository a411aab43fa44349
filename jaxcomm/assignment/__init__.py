"""Which stage has which block, and how each tensor is exchanged, as a mixed integer program."""
