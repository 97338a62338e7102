"""Retrievers: anything with `search(queries, k) -> Run`, so that fused and remote ones are retrievers too."""

from isthmus.facade import contents

__getattr__, __dir__, __all__ = contents(__name__)
