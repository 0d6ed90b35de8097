"""How much device memory a step takes, and which of its layers' tensors it should keep within a budget.

`liveness` estimates from the program alone, `trial` asks the compiler, `recompute` counts what keeping a
tensor spares, `choice` and `budget` choose.
"""

from xform.memory.budget import find, nothing_to_choose, parse_size, tell
from xform.memory.choice import Choice, Choices
from xform.memory.recompute import layers_of
from xform.memory.trial import Trial

__all__ = ["Choice", "Choices", "Trial", "find", "layers_of", "nothing_to_choose", "parse_size", "tell"]
