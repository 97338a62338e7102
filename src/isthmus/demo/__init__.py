"""The demonstration: a story with its report, then the same silos searched from one page."""

from isthmus.demo.story import open_page, searched, tell, tried

__all__ = ["open_page", "searched", "tell", "tried"]
