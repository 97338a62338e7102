"""Training one ranker across silos: aggregation, rounds, apps, runtimes."""

from isthmus.facade import contents

__getattr__, __dir__, __all__ = contents(__name__)
