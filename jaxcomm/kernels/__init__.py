"""What a backend must be told: platforms, bits, vectors, numerics, noise. Nothing above names a platform."""
