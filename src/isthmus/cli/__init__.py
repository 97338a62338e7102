"""The command line: parse, call, print."""

from isthmus.facade import contents

__getattr__, __dir__, __all__ = contents(__name__)
