"""The ledger: what left a silo, what it cost, and how much budget is left."""

from isthmus.facade import contents

__getattr__, __dir__, __all__ = contents(__name__)
