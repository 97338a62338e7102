"""Everything that is shown: progress and summaries, tables, figures, report pages."""

from isthmus.report.progress import Progress, box, progress, summary

__all__ = ["Progress", "box", "progress", "summary"]
