"""Where a program repeats: its stacks of layers, scanned or unrolled; nothing is rewritten.

`stacks` is the way in; `unrolled` searches a body for blocks, `repeats` matches two of them by their
dataflow, `blocks` lays them side by side.
"""

from xform.layers.stacks import Block, Refusal, Stack, find_stacks

__all__ = ["Block", "Refusal", "Stack", "find_stacks"]
