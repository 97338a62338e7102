"""Protection of everything that leaves a silo: noise, secure sums, keys and the ledger. No network code."""

from isthmus.facade import contents

__getattr__, __dir__, __all__ = contents(__name__)
