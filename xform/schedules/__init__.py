"""Schedules of pipelines as tables: made, read, checked, costed and drawn.

`make` has those with a name and `Schedule.loads` reads any other; `check` says whether one can run, `cost`
what it takes; `draw` and `html` show it, as text and in HTML.
"""

from xform.schedules.checks import check
from xform.schedules.costs import Cost, Costs, Send, cost
from xform.schedules.drawing import draw
from xform.schedules.makers import SCHEDULES, make
from xform.schedules.page import page as html
from xform.schedules.table import Kind, Schedule, Work

__all__ = [
    "SCHEDULES",
    "Cost",
    "Costs",
    "Kind",
    "Schedule",
    "Send",
    "Work",
    "check",
    "cost",
    "draw",
    "html",
    "make",
]
