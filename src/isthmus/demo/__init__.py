"""The demonstration: a story with its report, then the same silos searched from one page."""

from isthmus.facade import contents

__getattr__, __dir__, __all__ = contents(__name__)
