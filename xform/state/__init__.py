"""The state as the plan stores it: which arrays are kept stacked, the step over them, and both trees."""

from xform.state.placed import (
    Element,
    Groups,
    Layout,
    Placed,
    closed,
    gathered,
    is_placed,
    opened,
    row_path,
    scattered,
    whole,
)
from xform.state.rows import Left, Packed, Reordered, pack

__all__ = [
    "Element",
    "Groups",
    "Layout",
    "Left",
    "Packed",
    "Placed",
    "Reordered",
    "closed",
    "gathered",
    "is_placed",
    "opened",
    "pack",
    "row_path",
    "scattered",
    "whole",
]
