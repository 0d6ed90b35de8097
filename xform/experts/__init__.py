"""Tokens that go to experts: read as one operation, whatever way the rows of an expert come together.

`reading` finds where tokens are sorted by expert and what is done until they are back, `numbers` what is made
of the experts' numbers alone; `operation` is all of it as one equation, right for any number of tokens.
`raised` finds the other ways to write it: `capacity` (places that masks give), `dense` (all experts, and a
choice), `turns` (loops, made what `dense` reads) and `lookups` (weights of each token).
"""

from xform.experts.operation import Middle, Sorted
from xform.experts.raised import raised
from xform.experts.reading import lifted, refused

__all__ = ["Middle", "Sorted", "lifted", "raised", "refused"]
