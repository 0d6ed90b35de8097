"""Programs compiled for a TPU topology, without a TPU.

`compiling` is the way in; `packing` writes a program down for `child`, the process that compiles; `donation`
says what was reused.
"""

from xform.aot.compiling import CompilerError, OutOfDeviceMemory, Result, compile_lowered

__all__ = ["CompilerError", "OutOfDeviceMemory", "Result", "compile_lowered"]
