"""Measurements of the library: what it sends, how long that takes, and a lab to take them in."""
