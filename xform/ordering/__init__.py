"""The state stored in the order in which stages take its layers, so that no step moves rows.

    step(w, x):                                step(w in the order of stages, x):
      l, d = ... by_stage w ...                  l, d = ... w ...
      g = in_own_order d                  ->     n = sub w (mul d 0.1)
      n = sub w (mul g 0.1)                      return n
      return n

`ties` says which dimensions of which values have one order, since each row of them is treated alone,
`choosing` which of these are stored so, and `writing` writes the program, in which rows are put into another
order only where something takes them together. All of it is exact, but for sums over rows, which are told.
"""

from xform.ordering.writing import Stored, not_kept, stored_by_stage

__all__ = ["Stored", "not_kept", "stored_by_stage"]
