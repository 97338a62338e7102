"""Measures as values, what they say about runs and probabilities, and how sure that is."""

from isthmus.facade import contents

__getattr__, __dir__, __all__ = contents(__name__)
