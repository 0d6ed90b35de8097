"""Targets are found or refused by name, and shapes become arrays that a program can run on."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xform import PlanError
from xform.axes import find_axes
from xform.models import llama
from xform.roles import find_roles
from xform.targets import index_bounds, load, materialize

HERE = "tests.targets_for_tests"


def test_options_arrive_as_python_values():
    _, (params, _) = load(f"{HERE}:loss", ["width=40"])
    assert params["w"].shape == (40, 40)


@pytest.mark.parametrize(
    "target, options, says",
    [
        ("no_colon", [], "write module:factory"),
        ("no_such_module:x", [], "there is no module 'no_such_module'"),
        (f"{HERE}:los", [], "no factory 'los'; did you mean loss"),
        (f"{HERE}:loss", ["width"], "write key=value"),
        (f"{HERE}:not_a_pair", [], "gave int; a factory returns"),
        ("xform.models.llama:loss", ["size=8t"], "no size '8t'; the sizes are"),
        ("xform.models.llama:loss", ["siz=7b"], "-s siz=7b: no option 'siz' .did you mean 'size'.*length"),
        ("xform.models.lama:loss", [], "no module 'xform.models.lama'; did you mean xform.models.llama?"),
        ("tests/targets_for_tests.py:loss", [], "not its file: tests.targets_for_tests:loss"),
        (":loss", [], "write module:factory"),
        (f"{HERE}:loss", ["widht=3"], "no option 'widht' .did you mean 'width'"),
        (f"{HERE}:needs", [], "needs the option width: -s width=VALUE"),
        (
            f"{HERE}:fails",
            [],
            "its factory failed: KeyError: 'no data set'\n  .*targets_for_tests.py:.* in fails",
        ),
        (f"{HERE}:exits", [], "its factory exits: no data"),
        (f"{HERE}:not_an_array", [], r"the argument \[1\] is 'abc': arguments are arrays"),
        (f"{HERE}:not_a_tuple", [], "args are a tuple, of one argument too"),
        (f"{HERE}:too_few", [], "fn does not take the 1 arguments: missing a required argument: 'x'"),
    ],
)
def test_what_does_not_exist_is_named(target, options, says):
    with pytest.raises(PlanError, match=says):
        load(target, options)


@pytest.mark.parametrize(
    "text, says",
    [
        ("def f(:", "cannot be imported: SyntaxError"),
        (
            "import not_there",
            "cannot be imported: ModuleNotFoundError: No module named 'not_there'\n.*:1 in <module>",
        ),
        ("raise SystemExit(3)", "importing broken exits: 3"),
    ],
)
def test_a_module_that_cannot_be_imported_is_told_with_its_own_line(tmp_path, monkeypatch, text, says):
    (tmp_path / "broken.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    monkeypatch.delitem(sys.modules, "broken", raising=False)
    with pytest.raises(PlanError, match=says):
        load("broken:f")


def materialized(fn, args):
    jaxpr = jax.make_jaxpr(fn)(*args)
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_flatten_with_path(args)[0]]
    return materialize(args, jaxpr, find_roles(find_axes(jaxpr), None, paths), seed=1)


def test_tokens_are_below_the_vocabulary_and_use_it():
    fn, args = llama.train_step(size="tiny", layers=2)
    state, batch = materialized(fn, args)
    vocab = args[0].params["embed"]["embedding"].shape[0]
    for name in ("inputs", "targets"):
        assert batch[name].min() >= 0 and vocab // 2 < batch[name].max() < vocab
    assert float(jax.jit(fn)(state, batch)[1]["loss"]) > 0


def test_the_optimizer_starts_at_zero_and_parameters_do_not():
    fn, args = llama.train_step(size="tiny", layers=2)
    state, _ = materialized(fn, args)
    assert all(not np.any(x) for x in jax.tree.leaves(state.optimizer))
    assert all(np.any(x) for x in jax.tree.leaves(state.params))


def test_arrays_are_left_as_they_are_and_keys_are_keys():
    def fn(key, x):
        return jax.random.normal(key, (3,)) + x

    x = jnp.arange(3.0)
    key, same = materialized(fn, (jax.eval_shape(lambda: jax.random.key(0)), x))
    assert same is x
    assert jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key)


def test_bounds_are_found_inside_jit_scan_and_one_hot():
    def fn(table, tokens, classes, counts):
        def body(total, token):
            return total + jax.jit(lambda t, i: t[i])(table, token).sum(), None

        total, _ = jax.lax.scan(body, 0.0, tokens)
        return total + jax.nn.one_hot(classes, 13).sum() + counts.sum()

    shapes = jax.ShapeDtypeStruct((9,), jnp.int32)
    jaxpr = jax.make_jaxpr(fn)(jnp.ones((7, 5)), shapes, shapes, shapes)
    bounds = index_bounds(jaxpr)
    assert [bounds.get(v) for v in jaxpr.invars] == [None, 7, 13, None]
