"""What each tensor of a model is, by MaxText's name for it, and the layers they are in.

`names` gives the names; `layers` has each layer as a program with its tensors, `runs` takes equations out of
a body and puts them back, `flow` is the program's values across bodies.
"""

from xform.tensors.names import NAMES, PRODUCTS, Place, describe_tensors, name_tensors, tensor_rows

__all__ = ["NAMES", "PRODUCTS", "Place", "describe_tensors", "name_tensors", "tensor_rows"]
