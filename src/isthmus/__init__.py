"""Isthmus: search and ranking across data silos that may not share their data.

This file is the table of contents. A name is loaded when it is first used.
"""

from isthmus.facade import contents

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = contents(__name__)
