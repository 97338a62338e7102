"""Collections and feature sets, by name or from their files."""

from isthmus.facade import contents

__getattr__, __dir__, __all__ = contents(__name__)
