"""Learning of search models from sums over silos, and the decision whether to use them."""

from isthmus.facade import contents

__getattr__, __dir__, __all__ = contents(__name__)
