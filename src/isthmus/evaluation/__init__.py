"""Measures as values, evaluation of runs and probabilities with them, intervals and paired tests."""

from isthmus.facade import contents

__getattr__, __dir__, __all__ = contents(__name__)
