"""Search engines that hold a node's documents and find candidates among them, behind one protocol."""

from isthmus.facade import contents

__getattr__, __dir__, __all__ = contents(__name__)
