"""Rankers: linear models and MLPs in NumPy, their training, feature scaling, and gradient-boosted trees."""

from isthmus.facade import contents

__getattr__, __dir__, __all__ = contents(__name__)
