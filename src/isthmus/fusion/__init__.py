"""Fusion of several runs into one: normalisers, formulae, and methods that learn from judgements."""

from isthmus.facade import contents

__getattr__, __dir__, __all__ = contents(__name__)
