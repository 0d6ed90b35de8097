"""Whether a compiled program keeps what was promised: what is saved, computed again, on the host, quantized.

`kept` reads what the rewritten program itself says of tensors; `checked` compares the compiled one with it;
`multiplied` does so for products in eight bits.
"""

from xform.promises.checked import broken, check, check_compiled

__all__ = ["broken", "check", "check_compiled"]
