"""What the spellings of attention share: small arrays, a table by name, and the two usual products."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ROOT = 8**-0.5
"""The usual scale, where heads have 8 dimensions."""


def rand(seed: int, *shape: int, dtype: Any = np.float32) -> np.ndarray:
    """Normal numbers."""
    return np.random.RandomState(seed).normal(size=shape).astype(dtype)


def qkv(
    t: int = 5,
    s: int = 0,
    n: int = 4,
    kv: int = 0,
    e: int = 0,
    b: int = 2,
    dtype: Any = np.float32,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q [b, t, n, 8], k [b, s, kv, 8] and v [b, s, kv, e]; where not told, s is t, kv is n and e is 8."""
    s, kv = s or t, kv or n
    shapes = (b, t, n, 8), (b, s, kv, 8), (b, s, kv, e or 8)
    q, k, v = (rand(seed, *shape, dtype=dtype) for seed, shape in enumerate(shapes))
    return q, k, v


def heads_first(*args: np.ndarray) -> tuple[np.ndarray, ...]:
    """[b, t, n, d] as [b, n, t, d]."""
    return tuple(np.ascontiguousarray(np.swapaxes(x, 1, 2)) for x in args)


def by_name(*rows: Any) -> dict[str, Any]:
    """Spellings or look-alikes under the names of their functions."""
    table = {row.fn.__name__: row for row in rows}
    assert len(table) == len(rows), "two have one name"
    return table


def scores(q, k):
    """The scaled logits [b, n, t, s]."""
    return jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])


def mix(weights, v):
    """The values [b, t, n, e], mixed by weights [b, n, t, s]."""
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def attend(logits, v):
    """The values mixed by the softmax of the logits."""
    return mix(jax.nn.softmax(logits, axis=-1), v)


def positions(t: int, s: int):
    """Positions of queries [t, 1] and of keys [1, s]."""
    return jnp.arange(t)[:, None], jnp.arange(s)[None, :]
