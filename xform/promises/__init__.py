"""Whether a compiled program keeps what was promised of it: what is saved, computed again, on the host.

`kept` reads what the rewritten program itself says of tensors; `checked` compares the compiled one with it.
"""

from xform.promises.checked import broken, check, check_compiled

__all__ = ["broken", "check", "check_compiled"]
