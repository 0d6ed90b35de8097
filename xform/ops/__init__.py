"""High-level operations: what a program means, as one equation each, until it is lowered."""

from xform.ops.masks import Band
from xform.ops.operation import NAME, Operation, apply, operation_of

__all__ = ["NAME", "Band", "Operation", "apply", "operation_of"]
