"""How fast a device computes, reads its memory and talks to its host: to weigh computing again against
keeping, by figures that are public.

Sources: peak flops and memory bandwidths are those of `topologies.KINDS`; between host and chip PCIe carries
about 15 GB/s each way (How to Scale Your Model, https://jax-ml.github.io/scaling-book/tpus). A device that is
no TPU is taken for a v5e: what is compared are times on the same device, and ratios of flops to bytes differ
little.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from xform.topologies import KINDS, kind_of

ESTIMATED = 0.4
"""Of the memory's bandwidth, what the TPU compiler's estimated cycles come to for copies and elementwise
operations: read from training steps of Llama 7B for v5e, where a copy of 16.8 MB takes 152 thousand cycles.
"""

HOST = 1.5e10
"""Bytes a second between a chip and its host, each way."""


@dataclasses.dataclass(frozen=True)
class Speeds:
    """Of one device: floating-point operations, bytes from and to its memory, and to or from its host, each a
    second.
    """

    flops: float
    memory: float
    host: float


def speeds_of(device: Any) -> Speeds:
    """Those of a JAX device."""
    kind = kind_of(device) or next(k for k in KINDS if k.name == "v5e")
    return Speeds(kind.peak_flops, ESTIMATED * kind.bandwidth, HOST / kind.devices)
