"""Which dimensions of a program are the same axis; the program is not changed.

`walk` goes over it once; `rules` says what each primitive ties, `factors` is the algebra of what is tied, and
`integers` follows what is indexed.
"""

from xform.axes.walk import Axes, Dim, Factor, Path, Scope, find_axes

__all__ = ["Axes", "Dim", "Factor", "Path", "Scope", "find_axes"]
