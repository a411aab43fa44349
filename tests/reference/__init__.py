"""Slow NumPy transcriptions of the papers' algorithms, against which the library is tested."""
