"""The tables everything travels in: rankings, judgements, feature rows, corpora."""

from isthmus.facade import contents

__getattr__, __dir__, __all__ = contents(__name__)
