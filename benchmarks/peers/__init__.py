"""This library against PyTorch's DDP: one model, the same initial weights, the same rows, the same links."""
