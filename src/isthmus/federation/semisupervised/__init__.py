"""Co-training on pairs that nobody could label: CS-F-LTR, and sound alternatives for noisy counts."""

from isthmus.facade import contents

__getattr__, __dir__, __all__ = contents(__name__)
