"""Measurements of the library: what it sends and how long that takes, and the lab in which they are made."""
