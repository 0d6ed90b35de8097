"""Operations lifted into one equation each, and lowered back as they were; what a function means, as data."""

from collections import Counter
from typing import Any

import jax
import numpy as np
import pytest

from tests.public import PUBLIC
from xform import raised
from xform.higher_order import equations
from xform.models import gpt2, llama
from xform.ops import operation_of
from xform.raising.describe import models
from xform.raising.flat import views
from xform.raising.lifting import lifted, lowered
from xform.trace import eval_jaxpr

MODELS = {"llama": llama.loss, "gpt2": gpt2.loss}


@pytest.mark.parametrize("name", MODELS)
def test_what_is_lifted_and_lowered_again_is_the_same_program(name: str) -> None:
    fn, args = MODELS[name](size="tiny", length=16, batch=2, abstract=False)
    (jaxpr,) = models(fn, *args)
    up = lifted(jaxpr)
    found = Counter(op.name for eqn in equations(up) if (op := operation_of(eqn)) is not None)
    assert found["attention"] == 1
    assert found["cross_entropy"] == 1
    assert found["norm"] == 3
    down = lowered(up)
    assert not [eqn for eqn in equations(down) if operation_of(eqn) is not None]

    def primitives(program: Any) -> Counter[str]:
        return Counter(eqn.primitive.name for view in views(program) for eqn in view.eqns)

    before, after = primitives(jaxpr), primitives(down)
    assert not after - before  # nothing is new; what nobody reads is gone
    leaves = jax.tree.leaves(args)
    for got, want in zip(eval_jaxpr(down, *leaves), eval_jaxpr(jaxpr, *leaves), strict=True):
        np.testing.assert_array_equal(got, want)


def test_a_program_without_such_operations_is_itself() -> None:
    jaxpr = jax.make_jaxpr(lambda x: x * 2)(1.0)
    assert lifted(jaxpr) is jaxpr
    assert lowered(jaxpr) is jaxpr


PUBLIC_MASKS = {
    "gpt2": ["causal+padding"] * 2,
    "llama": ["causal+padding"] * 2,
    "mistral": ["causal+window+padding"] * 2,
    "bert": ["padding"] * 2,
    "bloom": ["causal+padding+alibi"] * 2,
    "t5": ["causal+padding+bias"] * 3 + ["padding"] * 3 + ["padding+bias"] * 2,
    "vit": ["full"] * 2,
    "whisper": ["causal+padding"] * 3 + ["full"] * 5,
}


@pytest.mark.parametrize("name", PUBLIC_MASKS)
def test_every_attention_head_and_norm_of_a_public_model_is_found(name: str) -> None:
    fn, args = PUBLIC[name]()
    found = raised(fn, *args)["raised"]
    assert sorted(e["mask"] for e in found if e["op"] == "attention") == PUBLIC_MASKS[name]
    assert sum(e["op"] == "cross_entropy" for e in found) == 1
    assert sum(e["op"] == "norm" for e in found) >= 4


def test_a_step_is_looked_at_where_it_differentiates() -> None:
    fn, args = llama.train_step(size="tiny")
    found = Counter(each["op"] for each in raised(fn, *args)["raised"])
    assert found == {"attention": 1, "cross_entropy": 1, "norm": 3, "layers": 1}
