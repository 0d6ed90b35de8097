"""A program as text, and the difference between two programs, for a reader.

`lines` and `text` print a program, `diff` and `diff_text` compare two and ignore renamed variables,
`stablehlo_diff` does the same for StableHLO texts, and `html` puts the stages of a program on a page.
"""

from xform.printing.difference import DiffLine, diff, diff_text
from xform.printing.listing import Line, Names, lines, text
from xform.printing.stablehlo import stablehlo_diff, stablehlo_rows
from xform.printing.webpage import html

__all__ = [
    "DiffLine",
    "Line",
    "Names",
    "diff",
    "diff_text",
    "html",
    "lines",
    "stablehlo_diff",
    "stablehlo_rows",
    "text",
]
