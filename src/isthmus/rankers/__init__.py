"""Rankers: linear and MLP in NumPy, their losses' training, feature scaling, and gradient-boosted trees."""

from isthmus.facade import contents

__getattr__, __dir__, __all__ = contents(__name__)
