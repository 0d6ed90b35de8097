"""What a program does with the rows of its batch, and the program cut where it has summed over them.

`states` says what the microbatches have to do with a value, and `rules` what each primitive makes of that
(with `elementwise`, `products`, `indexing` and `randoms`; `bodies` and `custom` for what holds programs).
`local` goes over a body and runs it on a microbatch, `cut` takes a whole program apart: what is computed once
before, what in each microbatch, what once after. `microbatches` is the scan over them, with its derivative.
"""

from xform.batch.cut import Cut, cut, find_batch, flat
from xform.batch.local import Placed
from xform.batch.microbatches import Microbatches
from xform.batch.search import cut_along_batch, divided
from xform.batch.states import Micro, Mixes, Split, State

__all__ = [
    "Cut",
    "Micro",
    "Microbatches",
    "Mixes",
    "Placed",
    "Split",
    "State",
    "cut",
    "cut_along_batch",
    "divided",
    "find_batch",
    "flat",
]
