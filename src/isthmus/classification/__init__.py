"""Text classification: rankers of labels, and classifiers with calibrated probabilities that can abstain."""

from isthmus.facade import contents

__getattr__, __dir__, __all__ = contents(__name__)
