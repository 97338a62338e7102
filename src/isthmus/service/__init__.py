"""Search across silos: nodes that hold documents, and a broker with one search box."""

from isthmus.facade import contents

__getattr__, __dir__, __all__ = contents(__name__)
