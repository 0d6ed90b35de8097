"""The state as the plan stores it: which arrays are kept stacked, the step over them, and both trees."""

from xform.state.order import Order, Ordered, Orders, only, order_at
from xform.state.placed import (
    Element,
    Groups,
    Layout,
    Placed,
    apart,
    closed,
    gathered,
    is_placed,
    opened,
    plain,
    row_path,
    scattered,
    stored,
    whole,
)
from xform.state.rows import Left, Packed, Reordered, pack

__all__ = [
    "Element",
    "Groups",
    "Layout",
    "Left",
    "Order",
    "Ordered",
    "Orders",
    "Packed",
    "Placed",
    "Reordered",
    "apart",
    "closed",
    "gathered",
    "is_placed",
    "only",
    "opened",
    "order_at",
    "pack",
    "plain",
    "row_path",
    "scattered",
    "stored",
    "whole",
]
