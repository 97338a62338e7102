"""Texts under labels: rankers of labels, and a classifier that says how sure it is and when to abstain."""

from isthmus.facade import contents

__getattr__, __dir__, __all__ = contents(__name__)
