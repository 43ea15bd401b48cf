"""One HTML page component: `page(title, sections)` gives the text of a single offline file.

The sections are plain data (`onnxamp.report.sections`): key figures, notes, tables, line plots and graph views.
"""

from onnxamp.report.page import page
from onnxamp.report.sections import (
    Box,
    Cell,
    Figures,
    Graph,
    GraphView,
    LinePlot,
    Link,
    Note,
    Section,
    Series,
    Table,
)

__all__ = [
    "Box",
    "Cell",
    "Figures",
    "Graph",
    "GraphView",
    "LinePlot",
    "Link",
    "Note",
    "Section",
    "Series",
    "Table",
    "page",
]
