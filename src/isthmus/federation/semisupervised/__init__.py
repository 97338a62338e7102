"""Training together on pairs that nobody could label: CS-F-LTR and what is right when counts are noisy."""

from isthmus.facade import contents

__getattr__, __dir__, __all__ = contents(__name__)
