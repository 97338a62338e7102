"""From scores to probabilities: calibrators, their federated fitting, and `calibrate(run, …) -> Run`."""

from isthmus.facade import contents

__getattr__, __dir__, __all__ = contents(__name__)
