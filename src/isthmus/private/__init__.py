"""What stands between a silo and the outside; no network code."""

from isthmus.facade import contents

__getattr__, __dir__, __all__ = contents(__name__)
