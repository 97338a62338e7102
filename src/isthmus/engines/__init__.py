"""Engines: what holds a node's documents and finds candidates among them, behind one protocol."""

from isthmus.facade import contents

__getattr__, __dir__, __all__ = contents(__name__)
