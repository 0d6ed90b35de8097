"""Tokens that go to experts: read as one operation, whatever way the rows of an expert come together.

`reading` finds where tokens are sorted by expert and what is done until they are back; `operation` is that as
one equation, right for any number of tokens.
"""

from xform.experts.operation import Middle, Sorted
from xform.experts.reading import lifted

__all__ = ["Middle", "Sorted", "lifted"]
