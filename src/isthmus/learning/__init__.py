"""The one learner of the product: search models from sums over silos, and whether to use them."""

from isthmus.facade import contents

__getattr__, __dir__, __all__ = contents(__name__)
