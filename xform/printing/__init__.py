"""A program as text, and the difference between two programs, for a reader: names that stay, source lines,
folding.

`lines` and `text` print a program, `diff` and `diff_text` compare two and ignore renamed variables,
`stablehlo_diff` does the same for StableHLO texts. `xform.html` puts several stages of one program on a
page.
"""

from xform.printing.diff import DiffLine, diff, diff_text
from xform.printing.lines import Line, Names, lines, text
from xform.printing.stablehlo import stablehlo_diff

__all__ = ["DiffLine", "Line", "Names", "diff", "diff_text", "lines", "stablehlo_diff", "text"]
