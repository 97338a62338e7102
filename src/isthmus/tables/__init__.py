"""The tables that all parts exchange: rankings, judgements, feature rows, corpora."""

from isthmus.facade import contents

__getattr__, __dir__, __all__ = contents(__name__)
