"""What the compiler made of a program, read from its HLO text.

`module` reads the text; `trips` says how often loops run, `collectives` what is sent, `costs` adds it all up,
`overlap` says what runs beside collectives, `buffers` reads the memory.
"""

from xform.hlo.module import (
    HOST_SPACE,
    Array,
    Computation,
    Instruction,
    Module,
    Path,
    arrays,
    element,
    parse,
    split_reference,
)

__all__ = [
    "HOST_SPACE",
    "Array",
    "Computation",
    "Instruction",
    "Module",
    "Path",
    "arrays",
    "element",
    "parse",
    "split_reference",
]
