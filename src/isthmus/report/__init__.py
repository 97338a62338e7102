"""Everything shown to users: progress and summaries, tables, plots, report pages."""

from isthmus.facade import contents

__getattr__, __dir__, __all__ = contents(__name__)
