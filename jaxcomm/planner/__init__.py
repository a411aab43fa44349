"""Plans: which stage holds which block of a model, and how each gradient is exchanged, for the shortest step."""
