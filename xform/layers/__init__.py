"""Where a program repeats: its stacks of layers, scanned or unrolled; nothing is rewritten.

`stacks` is the way in; `unrolled` searches a body for blocks, `repeats` matches two of them by their
dataflow, `blocks` lays them side by side. For what is made of a stack there are a block as a program
(`turns`), what differs as arrays (`columns`), constants as operands (`constants`), and loops in loops
(`nests`).
"""

from xform.layers.stacks import Block, Refusal, Stack, find_stacks

__all__ = ["Block", "Refusal", "Stack", "find_stacks"]
