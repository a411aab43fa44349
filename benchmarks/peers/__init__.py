"""This library beside PyTorch's: one model, the same initial weights, the same rows, the same links."""
