"""Retrievers: anything with `search(queries, k) -> Run`, so a fused or a remote one is a retriever too."""

from isthmus.facade import contents

__getattr__, __dir__, __all__ = contents(__name__)
