"""What each axis of a program is, and so what each input is and each dimension is called; nothing is changed.

`naming` gives roles by the ordered `rules`, over the `evidence` of the dataflow and what is `known` so far;
`logical` has MaxText's names for dimensions; `inputs` tells parameters, optimizer state and data apart.
"""

from xform.roles.naming import ROLES, Roles, describe, find_roles

__all__ = ["ROLES", "Roles", "describe", "find_roles"]
