"""The trainer: `python -m train`."""
