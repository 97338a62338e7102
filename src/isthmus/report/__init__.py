"""Everything that is shown: progress and summaries, tables, figures, report pages."""

from isthmus.report.pages import Page, Section
from isthmus.report.plots import Line, Plot, line_plot
from isthmus.report.progress import Progress, box, progress, summary
from isthmus.report.tables import FORMS, Cell, Estimate, Table
