"""What of a layer's tensors a policy keeps for the backward pass: MaxText's policies, and any set of names.

POLICIES["save_qkv_proj"]                                        # the names it saves, those it offloads
Keep(frozenset({"mlpwo"}), frozenset()).checkpoint(f, in_loop=True)
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax

QKV = ("query_proj", "key_proj", "value_proj", "kv_proj", "qkv_proj")
DOTS = (*QKV, "out_proj")
MLP = ("mlpwi", "mlpwi_0", "mlpwi_1", "mlpwo", "moe_mlpwi_0", "moe_mlpwi_1", "moe_mlpwo")

POLICIES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "none": ((), ()),
    "full": ((), ()),
    "minimal": ((*DOTS, *MLP), ()),
    "minimal_with_context": ((*DOTS, *MLP, "context"), ()),
    "minimal_with_quantization": ((*DOTS, *MLP, "quantization"), ()),
    "minimal_with_context_and_quantization": ((*DOTS, *MLP, "context", "quantization"), ()),
    "save_dot_with_context_except_mlp": ((*DOTS, "context"), ()),
    "save_dot_except_mlpwi": ((*DOTS, "mlpwo", "moe_mlpwo"), ()),
    "save_dot_except_mlp": (DOTS, ()),
    "save_qkv_proj": (QKV, ()),
    "save_out_proj": (("out_proj",), ()),
    "qkv_proj_offloaded": ((), QKV),
    "minimal_offloaded": ((), (*DOTS, *MLP)),
    "custom": ((), ()),
}
"""What each policy saves on the device, and what on the host: MaxText's, nnx_decoders.py, with its drift
mended: a fused projection is offloaded as well, and of experts both up-projections are saved."""

Policy = Literal[
    "none",
    "full",
    "minimal",
    "minimal_with_context",
    "minimal_with_quantization",
    "minimal_with_context_and_quantization",
    "save_dot_with_context_except_mlp",
    "save_dot_except_mlpwi",
    "save_dot_except_mlp",
    "save_qkv_proj",
    "save_out_proj",
    "qkv_proj_offloaded",
    "minimal_offloaded",
    "custom",
]


@dataclasses.dataclass(frozen=True, repr=False)
class Keep:
    """The names of what is saved and of what is offloaded, as `jax.checkpoint` asks it of each operation.

    open: whose budget is to choose; until then all tensors are named, and none is kept.
    """

    save: frozenset[str]
    offload: frozenset[str]
    open: object = None

    def __call__(self, *args: Any, **params: Any) -> Any:
        return self._jax(*args, **params)

    def __repr__(self) -> str:  # a set of strings is written in another order in each process
        return f"save {', '.join(sorted(self.save)) or '-'}; offload {', '.join(sorted(self.offload)) or '-'}"

    @functools.cached_property
    def _jax(self) -> Callable[..., Any]:
        return jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=sorted(self.save),
            names_which_can_be_offloaded=sorted(self.offload),
            offload_src="device",
            offload_dst="pinned_host",
        )

    def names(self, name: str | None) -> bool:
        """Whether a tensor gets its name, if it has one."""
        return name is not None and (self.open is not None or name in self.save or name in self.offload)

    def names_input(self, name: str) -> bool:
        """The same for what a layer takes, which is there anyhow: to save it is nothing."""
        return self.open is not None or name in self.offload

    def checkpoint(self, f: Callable[..., Any], in_loop: bool) -> Callable[..., Any]:
        """`f` so that only these names are there for its backward pass."""
        says = self.save or self.offload or self.open is not None
        return jax.checkpoint(f, policy=self if says else None, prevent_cse=not in_loop)
