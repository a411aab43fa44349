"""Architectures in flax.nnx, one file each."""
