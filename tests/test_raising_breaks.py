"""Where a mask can change: a band is told from few positions of it, and so is what is none."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xform.ops import Band
from xform.raising import bands, masks
from xform.raising.finding import find

SPELLINGS: dict[str, Callable[[Any, Any], Any]] = {
    "compared": lambda t, s: t >= s,
    "apart": lambda t, s: (t - s >= 0) & (t - s < 5),
    "number": lambda t, s: jnp.where(s > t, -1e30, 0.0) == 0,
    "floats": lambda t, s: t.astype(jnp.float32) >= s.astype(jnp.float32),
    "chunks": lambda t, s: (t // 4 == s // 4) & (s <= t),
    "prefix": lambda t, s: (s < 6) | (s <= t),
    "not": lambda t, s: ~(s > t),
    "counted from the end": lambda t, s: (20 - s) >= (20 - t),
    "both ways": lambda t, s: jnp.abs(t - s) < 3,
    "product": lambda t, s: (s <= t).astype(jnp.int32) * (t - s < 4).astype(jnp.int32) > 0,
}
WRONG: dict[str, Callable[[Any, Any], Any]] = {
    "one key": lambda t, s: (s <= t) & (s != 7),
    "one query": lambda t, s: (s <= t) & ((t != 11) | (s < 3)),
    "one pair": lambda t, s: (s <= t) & ~((t == 13) & (s == 2)),
    "out of order": lambda t, s: (s * 5 % 24) <= t,
    "strided": lambda t, s: (s <= t) & ((t - s) % 2 == 0),
    "more": lambda t, s: s <= t + t // 12,
}


def attention(seen: Callable[[Any, Any], Any], length: int) -> Any:
    def attend(q: Any, k: Any, v: Any) -> Any:
        at = jnp.arange(length)
        scores = jnp.einsum("btd,bsd->bts", q, k)
        scores = jnp.where(seen(at[:, None], at[None, :]), scores, -1e30)
        return jnp.einsum("bts,bsd->btd", jax.nn.softmax(scores, -1), v)

    shape = jax.ShapeDtypeStruct((1, length, 3), jnp.float32)
    return jax.make_jaxpr(attend)(shape, shape, shape)


def told(seen: Callable[[Any, Any], Any], length: int) -> Band | None:
    (found,) = find(attention(seen, length), "attention").raised
    band: Band | None = found.meaning.mask.band
    return None if found.meaning.mask.table else band


@pytest.mark.parametrize("name", [*SPELLINGS, *WRONG])
def test_a_mask_is_what_it_is_at_every_position(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = (SPELLINGS | WRONG)[name]
    found = told(seen, 24)
    monkeypatch.setattr(masks, "breaks", lambda *args: None)
    assert found == told(seen, 24)
    assert (found is None) == (name in WRONG)
    at = np.arange(24)
    if found is not None:
        want = np.asarray(seen(jnp.arange(24)[:, None], jnp.arange(24)[None]))
        np.testing.assert_array_equal(np.broadcast_to(found.allowed(at[:, None], at), (24, 24)), want)


@pytest.mark.parametrize("name", [name for name in SPELLINGS if name != "both ways"])
def test_a_long_mask_is_looked_at_in_few_places(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    places = list[int]()
    known = bands._places

    def counted(*args: Any) -> Any:
        places.append((found := known(*args)).shape[1])
        return found

    monkeypatch.setattr(bands, "_places", counted)
    assert told(SPELLINGS[name], 1 << 15) is not None
    assert places and max(places) < 12
