"""The three ways a rewrite can end badly, one exception each.

The plan is wrong (`PlanError`), the program is not ours to change (`Decline`), or xform itself broke
something (`RewriteError`). Every message quotes the option or the user's line and says what would work.
"""


class PlanError(ValueError):
    """The plan cannot be honoured: says which option, what is allowed and what to do instead."""


class PromiseError(PlanError):
    """The compiled program does not keep what a pass promised of it: says which tensor, and why."""


class Decline(Exception):
    """Raised by a rule: this operation is mine, but I leave it alone, because (the message)."""


class RewriteError(RuntimeError):
    """A pass produced something that is not the program it was given: a fault of xform, not of the user."""
