"""Isthmus: search and ranking across data silos that may not share their data."""

__version__ = "0.1.0"
