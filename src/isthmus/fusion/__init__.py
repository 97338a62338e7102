"""One run from many: normalisers, fusers, learned fusion, and what to do with the probabilities."""

from isthmus.facade import contents

__getattr__, __dir__, __all__ = contents(__name__)
