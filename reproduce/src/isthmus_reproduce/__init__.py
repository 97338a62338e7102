"""The papers' tables and figures, computed with Isthmus: printed, paper mode and sound mode side by side."""

__version__ = "0.1.0"
