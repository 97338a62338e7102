"""Everything that is shown: progress and summaries, tables, figures, report pages."""

from isthmus.facade import contents

__getattr__, __dir__, __all__ = contents(__name__)
