"""Roll: layers in a loop give what the layers gave, values and gradients; what cannot be rolled says why."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

from tests import ours, public
from tests.layers import f, picked, told
from tests.loops import KEYS, attend, dropout, evaluated, layer, mlp, model, norm, one, random, random_layer
from xform import Plan, PlanError, Remat, Report, Roll, parallelize
from xform.context import Context, Leaf
from xform.higher_order import equations
from xform.trace import Jaxpr, eval_jaxpr, name_stack, source_line


def roll(loss: Callable, args: Any, **options: Any) -> tuple[Jaxpr, Report]:
    """The rolled program of a loss."""
    roles = told(loss, args)
    report = Report()
    leaves = [Leaf(path, v.aval) for path, v in zip(roles.paths, roles.axes.jaxpr.invars, strict=True)]
    context = Context("model", jax.make_mesh((1,), ("x",)), report, leaves, [])
    return Roll(**options).rewrite(roles.axes.jaxpr, context), report


def scans(jaxpr: Jaxpr) -> list[int]:
    return [eqn.params["length"] for eqn in equations(jaxpr) if eqn.primitive.name == "scan"]


def products(jaxpr: Jaxpr) -> int:
    """The contractions at all depths: of layers that are unrolled there are more."""
    return sum(eqn.primitive.name == "dot_general" for eqn in equations(jaxpr))


def differentiated(fn: Callable) -> Callable:
    """The gradient of the sum of all floating-point results, and the results."""

    def total(args: Any) -> Any:
        out = fn(*args)
        reals = [x for x in jax.tree.leaves(out) if jnp.issubdtype(x.dtype, jnp.floating)]
        return sum(jnp.sum(jnp.sin(x)) for x in reals), out

    return lambda *args: jax.value_and_grad(total, has_aux=True, allow_int=True)(args)


def check(loss: Callable, args: Any, **options: Any) -> tuple[Jaxpr, Report]:
    """The rolled program of a loss, which has the values and gradients of the loss."""
    jaxpr, report = roll(loss, args, **options)
    inputs = random(args)

    def original(*leaves: Any) -> Any:
        return jax.tree.leaves(loss(*jax.tree.unflatten(jax.tree.structure(args), leaves)))

    programs = (original, functools.partial(eval_jaxpr, jaxpr))
    expected, found = (evaluated(jax.make_jaxpr(differentiated(each))(*inputs), *inputs) for each in programs)
    for a, b in zip(expected, found, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if jnp.issubdtype(a.dtype, jnp.floating):
            size = float(np.max(np.abs(a), initial=0.0))
            np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-5 * size)
    return jaxpr, report


def loop(turn: Callable) -> Callable:
    """Layers one by one: `turn(n, x, w, params)`."""

    def apply(params: Any, x: Any) -> Any:
        for n, w in enumerate(params["layers"]):
            x = turn(n, x, w, params)
        return x

    return apply


plain = loop(lambda n, x, w, params: layer(x, w))


def windowed(window: Callable[[int], int], wrap: Callable = lambda f: f) -> Callable:
    """Layers that see so many tokens back."""

    def apply(params: Any, x: Any) -> Any:
        at = jnp.arange(7)
        for n, w in enumerate(params["layers"]):
            run = wrap(lambda x, w, n=n: layer(x, w, at[:, None] - at[None, :] < window(n)))
            x = run(x, w)
        return x

    return apply


def scaled(n: int, x: Any, w: Any, params: Any) -> Any:
    return layer(x, w) * (0.5 + n)


def masked(n: int, x: Any, w: Any, params: Any) -> Any:
    return layer(x, w, np.tril(np.ones((7, 7), bool), -n) | np.eye(7, dtype=bool))


def decayed(n: int, x: Any, w: Any, params: Any) -> Any:
    return layer(x, w) * np.linspace(0.1 + n, 1, 12, dtype=np.float32)


def of_inputs(n: int, x: Any, w: Any, params: Any) -> Any:
    return layer(x, w) * params["scales"][n]


def skipping(n: int, x: Any, w: Any, params: Any) -> Any:
    return layer(x, w) + params["skip"] * jnp.cos(params["table"][0])


def tied(n: int, x: Any, w: Any, params: Any) -> Any:
    return layer(x, w | {"norm": params["final"], "k": w["q"]}, bias=params["table"][0, 0])


def summed(params: Any, x: Any) -> Any:
    total = 0.0
    for w in params["layers"]:
        total += jnp.mean(jnp.square(x))
        x = layer(x, w) + total
    return x, total


def read_twice(params: Any, x: Any) -> Any:
    """The first layer has a number where the others have a value, at two places."""
    total = 0.0
    for w in params["layers"]:
        total = total + jnp.mean(x) * total + jnp.mean(x)
        x = layer(x, w) + total
    return x, total


def observed(params: Any, x: Any) -> Any:
    """Something small of what each layer takes."""
    seen = []
    for w in params["layers"]:
        seen.append(jnp.mean(jnp.square(x)))
        x = layer(x, w)
    return x, seen


def collected(params: Any, x: Any) -> Any:
    states, total = [], 0.0
    for w in params["layers"]:
        states.append(x)
        x = layer(x, w)
        total += jnp.mean(jnp.square(x @ w["up"]))
    return x, states, total


def prefixed(params: Any, x: Any) -> Any:
    for n, w in enumerate(params["layers"]):
        x = layer(x, w, act=jnp.sin if n == 0 else jnp.tanh)
    return jnp.cos(x) @ params["layers"][0]["q"]


def first_for_all(params: Any, x: Any) -> Any:
    bias = None
    for w in params["layers"]:
        normed = norm(x, w["norm"])
        if bias is None:
            at = jnp.arange(7)
            bias = params["distance"][jnp.abs(at[:, None] - at[None, :])]
        x = x + attend(normed, w, bias=bias)
        x = x + mlp(x, w)
    return x


def from_the_first(params: Any, x: Any) -> Any:
    """The first layer takes one value three times over: as what it carries, and as what all read."""
    first = y = x
    for w in params["layers"]:
        x = x + attend(norm(y, w["norm"]), w) + 0.1 * first
        y = y + mlp(x, w)
    return x * y


def all_at_once(params: Any, x: Any) -> Any:
    small = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params["layers"][::-1])
    for n, w in enumerate(small[::-1]):
        x = layer(x, jax.tree.map(lambda w: w.astype(jnp.float32), w))
        if n == 1:
            jnp.sin(x) @ params["final"]
    return x


def stacked(params: Any, x: Any) -> Any:
    """Weights that are one array already, of which the first layer is another."""
    for n in range(1, 5):
        x = layer(x, jax.tree.map(lambda w, n=n: w[n], params["all"]))
    return x


def grouped(params: Any, x: Any) -> Any:
    """Layers that share weights, now these, now those."""
    for n, w in zip((0, 1, 1, 0, 2), params["layers"], strict=True):
        x = layer(x, w | {"up": params["layers"][n]["up"]})
    return x


def masks_in_turn(params: Any, x: Any) -> Any:
    at = jnp.arange(7)
    masks = [at[:, None] >= at[None, :], abs(at[:, None] - at[None, :]) < 3]
    for n, w in enumerate(params["layers"]):
        x = layer(x, w, masks[n % 2])
    return x


def jitted(params: Any, x: Any) -> Any:
    run = jax.jit(layer)
    for w in params["layers"]:
        x = run(x, w)
    return x


def in_jit_in_jit(params: Any, x: Any) -> Any:
    return jax.jit(lambda params, x: jax.jit(plain)(params, jnp.sin(x)))(params, x)


def in_a_branch(params: Any, x: Any) -> Any:
    return jax.lax.cond(x[0, 0, 0] > 0, lambda x: plain(params, x), jnp.sin, x)


def in_checkpoint(params: Any, x: Any) -> Any:
    return jax.checkpoint(plain)(params, x)


def experts(params: Any, x: Any) -> Any:
    """A dense and an expert layer in turn, and a last dense one that fills no turn."""
    for n, w in enumerate(params["layers"]):
        x = x + attend(norm(x, w["norm"]), w)
        if n % 2 and n < 4:
            moe = params["moe"][n // 2]
            gate = jax.nn.softmax(x @ moe["router"])
            x = x + jnp.einsum("bln,blne->ble", gate, jnp.einsum("ble,nef->blnf", x, moe["experts"]))
        else:
            x = x + mlp(x, w)
    return x


def both(params: Any, x: Any) -> Any:
    """An encoder and a decoder that reads what it gives."""
    y = jnp.cos(x)
    for w in params["layers"]:
        y = layer(y, w)
    for w in params["decoder"]:
        x = layer(x, w) + attend(y, w)
    return x


def of_tuples(params: Any, x: Any) -> Any:
    for up, down in params["all"]:
        x = x + jnp.tanh(x @ up) @ down
    return x


PROGRAMS: dict[str, tuple[Callable, int, dict[str, Any], list[int]]] = {
    "plain": (plain, 3, {}, [3]),
    "windows": (windowed(lambda n: 2 + n), 4, {}, [4]),
    "scales": (loop(scaled), 3, {}, [3]),
    "masks": (loop(masked), 3, {}, [3]),
    "vectors": (loop(decayed), 3, {}, [3]),
    "inputs": (loop(of_inputs), 3, {"scales": f(3)}, [3]),
    "skips": (loop(skipping), 3, {"skip": f(12)}, [3]),
    "tied": (loop(tied), 3, {}, [3]),
    "sum": (summed, 3, {}, [3]),
    "read twice": (read_twice, 3, {}, [3]),
    "observed": (observed, 3, {}, [3]),
    "collected": (collected, 3, {}, [3]),
    "prefix": (prefixed, 4, {}, [3]),
    "first for all": (first_for_all, 3, {"distance": f(7)}, [3]),
    "from the first": (from_the_first, 4, {}, [4]),
    "casts at once": (all_at_once, 3, {}, [3]),
    "stacked": (stacked, 1, {"all": jax.tree.map(lambda w: f(5, *w.shape), one())}, [4]),
    "groups": (grouped, 5, {}, [5]),
    "jit": (jitted, 3, {}, [3]),
    "jit in jit": (in_jit_in_jit, 3, {}, [3]),
    "branch": (in_a_branch, 3, {}, [3]),
    "checkpoint": (in_checkpoint, 3, {}, [3]),
    "windows in checkpoint": (windowed(lambda n: 2 + n, jax.checkpoint), 3, {}, [3]),
    "windows in jit": (windowed(lambda n: 2 + n, jax.jit), 3, {}, [3]),
    "windows in both": (windowed(lambda n: 2 + n, lambda f: jax.checkpoint(jax.jit(f))), 3, {}, [3]),
    "windows in twice both": (
        windowed(lambda n: 2 + n, lambda f: jax.jit(jax.checkpoint(jax.jit(jax.checkpoint(f))))),
        3,
        {},
        [3],
    ),
    "experts": (experts, 5, {"moe": [{"router": f(12, 5), "experts": f(5, 12, 12)}] * 2}, [2]),
    "encoder and decoder": (both, 3, {"decoder": [one()] * 4}, [3, 4]),
    "tuples": (of_tuples, 1, {"all": ((f(12, 20), f(20, 12)),) * 3}, [3]),
    "cycle": (windowed(lambda n: (2, 3, 9)[n % 3]), 6, {}, [2]),
    "cycle that does not end": (windowed(lambda n: (2, 3)[n % 2]), 5, {}, [5]),
    "masks in turn": (masks_in_turn, 5, {}, [5]),
}


ALIKE = {"plain", "scales", "vectors", "inputs", "windows", "windows in checkpoint", "windows in jit"}
ALIKE |= {"windows in both", "jit", "jit in jit", "checkpoint", "cycle that does not end", "tuples"}
"""Programs of which another has all that may give other values."""


@pytest.mark.parametrize("name", PROGRAMS)
def test_layers_are_one_loop(name: str) -> None:
    apply, layers, more, lengths = PROGRAMS[name]
    jaxpr, _ = roll(*model(apply, layers, **more))
    assert scans(jaxpr) == lengths


@pytest.mark.slow  # compiles the operations of all these programs and their gradients
@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in ALIKE])
def test_the_loop_gives_what_the_layers_gave(name: str) -> None:
    apply, layers, more, _ = PROGRAMS[name]
    check(*model(apply, layers, **more))


@pytest.mark.slow  # compiles random numbers of each kind
@pytest.mark.parametrize(("how", "raw"), [(how, how == "chained") for how in KEYS])
def test_dropout_draws_what_it_drew(how: str, raw: bool) -> None:
    def loss(params: Any, tokens: Any, labels: Any, key: Any) -> Any:
        x = params["table"][tokens]
        key = jax.random.key_data(key) if raw else key
        for w, sub in zip(params["layers"], KEYS[how][0](key, 3), strict=True):
            x = dropout(sub, layer(x, w))
        return picked(x @ params["table"].T, labels)

    _, args = model(plain, 3)
    jaxpr, _ = roll(loss, (*args, jax.eval_shape(lambda: jax.random.key(0))))
    assert scans(jaxpr) == [3]
    inputs = random((*args, jax.eval_shape(lambda: jax.random.key(0))))
    original = jax.make_jaxpr(lambda *xs: loss(*jax.tree.unflatten(jax.tree.structure((*args, 0)), xs)))
    np.testing.assert_allclose(evaluated(jaxpr, *inputs), evaluated(original(*inputs), *inputs), rtol=1e-5)


@pytest.mark.slow  # compiles the operations of random programs
@pytest.mark.parametrize("seed", range(3))
def test_random_layers(seed: int) -> None:
    run = random_layer(seed)

    def apply(params: Any, x: Any) -> Any:
        shared, collected = jnp.cos(x @ params["first"]), []
        for n, w in enumerate(params["layers"], 1):
            x, extra = run(n, x, w, shared)
            collected.append(extra)
        return x, collected

    jaxpr, _ = check(*model(apply, 4, first=f(12, 12)))
    assert scans(jaxpr) == [4]


@pytest.mark.slow  # compiles the operations of whole models
@pytest.mark.parametrize("name", ours.MODELS)
def test_a_decoding_step_gives_its_caches_back(name: str) -> None:
    step, args = ours.MODELS[name].decode_step(size="tiny", layers=3, scan=False)
    jaxpr, report = roll(step, args)
    inputs = random(args)
    assert scans(jaxpr) == [3] and "collects 2" in str(report)
    expected = evaluated(jax.make_jaxpr(step)(*jax.tree.unflatten(jax.tree.structure(args), inputs)), *inputs)
    for a, b in zip(expected, evaluated(jaxpr, *inputs), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------- real models


LOOPS = {name: [3, 4] if name in ("t5", "whisper") else [3] for name in public.PUBLIC}


@functools.cache
def of_two_layers(name: str) -> Jaxpr:
    """A public model's rolled loss."""
    return roll(*public.PUBLIC[name]())[0]


@pytest.mark.slow  # traces real models
@pytest.mark.parametrize("name", LOOPS)
def test_the_layers_of_a_public_model_are_one_loop(name: str) -> None:
    jaxpr, report = roll(*public.PUBLIC[name](layers=3))
    assert scans(jaxpr) == LOOPS[name] and not report.of("declined")
    small = of_two_layers(name)
    assert products(small) == products(jaxpr), "as many contractions whatever the number of layers"


@pytest.mark.slow  # compiles the gradient of a real model twice
@pytest.mark.parametrize("name", [name for name in LOOPS if name not in ("t5", "vit")])
def test_a_public_model_gives_what_it_gave(name: str) -> None:
    """Training steps of T5, of ViT and of our Llama, rolled and sharded, are compared in test_plans."""
    jaxpr, (_, args) = of_two_layers(name), public.PUBLIC[name]()
    rolled = jax.value_and_grad(lambda leaves: eval_jaxpr(jaxpr, *leaves)[0], allow_int=True)
    value, found = jax.jit(rolled)(jax.tree.leaves(args))
    wanted, expected = public.gradients(name)
    assert wanted.dtype == value.dtype
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    leaves = jax.tree.leaves(expected)
    pairs = [(a, b) for a, b in zip(leaves, found, strict=True) if a.dtype == jnp.float32]
    largest = max(float(np.max(np.abs(a))) for a, _ in pairs)
    for a, b in pairs:
        # The gradient of a bias on all keys is zero but for rounding, and as small as that.
        size = max(float(np.max(np.abs(a))), 1e-2 * largest)
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-5 * size)


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("name", ours.MODELS)
def test_our_models_are_loops(name: str, remat: bool) -> None:
    jaxpr, report = roll(*ours.MODELS[name].loss(size="tiny", layers=3, scan=False, remat=remat))
    scanned = told(*ours.MODELS[name].loss(size="tiny", layers=3, scan=True, remat=remat)).axes.jaxpr
    assert scans(jaxpr) == scans(scanned) and products(jaxpr) == products(scanned)
    assert remats(jaxpr) == [False] * len(scans(jaxpr)) * remat
    assert ("prevent_cse=False" in str(report)) == remat


# ---------------------------------------------------------------- what comes of it


def remats(jaxpr: Jaxpr) -> list[Any]:
    return [eqn.params["prevent_cse"] for eqn in equations(jaxpr) if eqn.primitive.name == "remat2"]


def test_a_program_of_many_layers_is_no_longer_than_one_of_few() -> None:
    def counted(layers: int) -> tuple[int, int]:
        found = list(equations(roll(*model(plain, layers))[0]))
        stacks = [eqn for eqn in found if eqn.primitive.name == "stack"]
        assert {len(eqn.invars) for eqn in stacks} == {layers}
        return len(found), len(stacks)

    assert counted(4) == counted(32)


def test_the_same_program_comes_out_each_time() -> None:
    def text() -> str:
        loss, args = model(windowed(lambda n: 2 + n, jax.checkpoint), 3)
        program = parallelize(jax.grad(lambda *a: loss(*a)[0]), Plan({}, [Roll()]))
        return program.lower(*args).as_text()

    assert text() == text()


def test_what_stands_in_the_loop_has_the_first_layers_names_and_lines() -> None:
    def apply(params: Any, x: Any) -> Any:
        for n, w in enumerate(params["layers"]):
            with jax.named_scope(f"layers_{n}"):
                x = layer(x, w)
        return x

    jaxpr, _ = roll(*model(apply, 3))
    (scan,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan")
    inside = scan.params["jaxpr"].eqns
    assert all(name_stack(eqn).split("/")[0] == "layers_0" for eqn in inside) and name_stack(scan) == ""
    assert all("loops.py" in source_line(eqn) for eqn in inside)
    assert "loops.py" in source_line(scan)


def test_the_loop_is_what_remat_treats() -> None:
    loss, args = model(plain, 4)
    step = parallelize(jax.value_and_grad(loss, has_aux=True), Plan({}, [Roll(), Remat("full")]))
    program = step.trace(*args)
    assert "wrapped the body of a scan over 4 layers" in str(program.report)
    assert "stored 28 arrays of the state as 7" in str(program.report)


def test_arrays_that_layers_index_are_gone_through_as_they_are() -> None:
    apply, layers, more, _ = PROGRAMS["stacked"]
    jaxpr, report = roll(*model(apply, layers, **more))
    assert "goes through 7 arrays as they are" in str(report)
    assert not any(eqn.primitive.name == "stack" for eqn in equations(jaxpr))


def test_masks_that_come_again_are_stacked_once() -> None:
    jaxpr, _ = roll(*model(masks_in_turn, 5))
    sizes = [v.aval.shape for eqn in jaxpr.eqns if eqn.primitive.name == "stack" for v in eqn.outvars]
    assert (2, 7, 7) in sizes and (5, 7, 7) not in sizes


def test_only_what_is_read_of_a_layer_is_collected() -> None:
    jaxpr, _ = roll(*model(observed, 3))
    (collected,) = (eqn.invars for eqn in jaxpr.eqns if eqn.primitive.name == "unstack")
    assert [v.aval.shape for v in collected] == [(3,)]


def test_effects_stay_in_order() -> None:
    seen: list[float] = []

    def told_of(n: int, x: Any, w: Any, params: Any) -> Any:
        io_callback(lambda value: seen.append(float(value)), None, x[0, 0, 0], ordered=True)
        return layer(x, w)

    loss, args = model(loop(told_of), 3)
    jaxpr, report = roll(loss, args)
    assert scans(jaxpr) == [3] and "collects" not in str(report)
    inputs = random(args)
    jax.block_until_ready(jax.jit(functools.partial(eval_jaxpr, jaxpr))(*inputs))
    jax.effects_barrier()
    found = seen[:]
    jax.block_until_ready(loss(*jax.tree.unflatten(jax.tree.structure(args), inputs)))
    jax.effects_barrier()
    np.testing.assert_allclose(seen[3:], found, rtol=1e-5)
    assert len(set(found)) == 3


# ---------------------------------------------------------------- what is not rolled


def test_a_shape_that_a_constant_decided_is_named() -> None:
    def sliced(n: int, x: Any, w: Any, params: Any) -> Any:
        return jax.checkpoint(lambda x, w: layer(x, w) + jnp.sum(x[:, n:], 1, keepdims=True))(x, w)

    with pytest.raises(
        PlanError, match=r"no layers to roll.*`slice start_indices=\(0, 2, 0\)` \(test_roll.py"
    ):
        roll(*model(loop(sliced), 3))


def test_a_power_that_a_constant_decided_is_named() -> None:
    def power(n: int, x: Any, w: Any, params: Any) -> Any:
        return layer(x, w) + (x ** (n + 2) if n else jnp.sin(x) ** 2)

    with pytest.raises(PlanError, match=r"`integer_pow y=4`.*has `integer_pow y=3`"):
        roll(*model(loop(power), 3))


def test_where_there_are_no_layers_the_plan_is_wrong() -> None:
    with pytest.raises(PlanError, match="roll: the model has no layers to roll"):
        roll(*model(lambda params, x: jnp.sin(x), 1))


def test_a_layer_that_differs_is_told_beside_those_that_are_rolled() -> None:
    apply, layers, more, _ = PROGRAMS["prefix"]
    _, report = roll(*model(apply, layers, **more))
    (note,) = report.of("declined")
    assert "`tanh`" in note.why and "`sin`" in note.why and "loops.py" in note.where


def test_layers_in_a_custom_rule_stay() -> None:
    def apply(params: Any, x: Any) -> Any:
        ruled = jax.custom_vjp(plain)
        ruled.defvjp(lambda params, x: (plain(params, x), params), lambda params, g: (params, g))
        return ruled(params, x)

    loss, args = model(apply, 3)
    jaxpr, report = roll(loss, args)
    assert scans(jaxpr) == [] and "differentiation rule of the user's own" in str(report)


def test_loops_over_layers_stay_as_they_are() -> None:
    loss, args = model(lambda params, x: jax.lax.scan(turn, x, params["all"])[0], 1, all=stacked_by(3))
    jaxpr, report = roll(loss, args)
    assert jaxpr is not None and scans(jaxpr) == [3] and not list(report)


def test_layers_one_by_one_in_a_loop_over_layers_stay() -> None:
    def pair(x: Any, ws: Any) -> Any:
        for n in range(2):
            x = layer(x, jax.tree.map(lambda w, n=n: w[n], ws))
        return x, None

    loss, args = model(lambda params, x: jax.lax.scan(pair, x, params["all"])[0], 1, all=stacked_by(3, 2))
    jaxpr, report = roll(loss, args)
    assert scans(jaxpr) == [3] and "there are layers one by one in each turn" in str(report)


def test_arrays_that_are_known_are_stacked_before_the_program_runs() -> None:
    masks = [jnp.tril(jnp.ones((7, 7), bool), -n) | jnp.eye(7, dtype=bool) for n in range(3)]
    for made in (masks, list(map(np.asarray, masks))):
        jaxpr, _ = roll(*model(loop(lambda n, x, w, params, made=made: layer(x, w, made[n])), 3))
        stacks = [eqn for eqn in equations(jaxpr) if eqn.primitive.name == "stack"]
        assert len(stacks) == 7 and (3, 7, 7) in [np.shape(const) for const in jaxpr.consts]


def test_no_option_is_guessed() -> None:
    with pytest.raises(PlanError, match=r"roll\.nesting: no nesting 'square'.*flat, keep, sqrt"):
        roll(*model(plain, 3), nesting="square")


# ---------------------------------------------------------------- loops in loops


def stacked_by(*sizes: int) -> Any:
    return jax.tree.map(lambda w: f(*sizes, *w.shape), one())


def turn(x: Any, w: Any) -> Any:
    return layer(x, w), None


def simply(x: Any, ws: Any) -> Any:
    return jax.lax.scan(turn, x, ws)


def backwards(x: Any, ws: Any) -> Any:
    return jax.lax.scan(lambda x, w: (layer(x, w), jnp.sum(x)), x, ws, reverse=True)


def numbered(x: Any, scanned: Any) -> Any:
    """Numbers of the group and, made anew in each turn, of the layer."""
    ws, group = scanned

    def run(x: Any, scanned: Any) -> Any:
        w, n = scanned
        return layer(x, w) * (1 + 0.1 * group) * (2 + n), (jnp.sum(x), x)

    return jax.lax.scan(run, x, (ws, jnp.arange(2)))


def twice(x: Any, ws: Any) -> Any:
    return jax.lax.scan(simply, x, ws)


NESTS: dict[str, tuple[Callable, tuple[int, ...], Callable, bool]] = {
    "simply": (simply, (3, 2), lambda ws: ws, False),
    "in jit": (jax.jit(simply), (3, 2), lambda ws: ws, False),
    "backwards": (backwards, (3, 2), lambda ws: ws, True),
    "numbered": (numbered, (3, 2), lambda ws: (ws, jnp.arange(3)), False),
    "three": (twice, (2, 3, 2), lambda ws: ws, False),
}


@pytest.mark.parametrize("name", NESTS)
def test_loops_in_loops_are_one(name: str) -> None:
    body, sizes, scanned, reverse = NESTS[name]

    def apply(params: Any, x: Any) -> Any:
        return jax.lax.scan(body, x, scanned(params["all"]), reverse=reverse)

    loss, args = model(apply, 1, all=stacked_by(*sizes))
    jaxpr, report = roll(loss, args)
    assert scans(jaxpr) == [np.prod(sizes)] and "turns are one of" in str(report)
    assert len(scans(roll(loss, args, nesting="keep")[0])) == len(sizes)


@pytest.mark.slow  # compiles the operations of all these programs
@pytest.mark.parametrize("name", NESTS)
def test_the_one_loop_gives_what_both_gave(name: str) -> None:
    body, sizes, scanned, reverse = NESTS[name]

    def apply(params: Any, x: Any) -> Any:
        return jax.lax.scan(body, x, scanned(params["all"]), reverse=reverse)

    check(*model(apply, 1, all=stacked_by(*sizes)))


def test_what_stands_around_the_inner_loop_is_named() -> None:
    def around(x: Any, ws: Any) -> Any:
        return jnp.tanh(simply(x, ws)[0]), None

    def anew(x: Any, ws: Any) -> Any:
        def run(carry: Any, w: Any) -> Any:
            return (layer(carry[0], w) * carry[1], carry[1] + 1), None

        return jax.lax.scan(run, (x, 0.0), ws)[0][0], None

    def shared(x: Any, scanned: Any) -> Any:
        ws, scale = scanned
        return jax.lax.scan(lambda x, w: (layer(x, w) * scale, None), x, ws)

    scales = jnp.ones((3, 12))
    for body, scanned, why in (
        (around, lambda ws: ws, "`tanh` (test_roll.py"),
        (jax.checkpoint(simply), lambda ws: ws, "jax.checkpoint is around the inner loop"),
        (anew, lambda ws: ws, "carries 0.0, which starts anew in each turn"),
        (shared, lambda ws: (ws, scales), "float32[12] is not one a layer: the inner loop shares it"),
    ):
        loss, args = model(
            lambda p, x, b=body, s=scanned: jax.lax.scan(b, x, s(p["all"])), 1, all=stacked_by(3, 2)
        )
        jaxpr, report = roll(loss, args)
        assert scans(jaxpr) == [3, 2]
        (note,) = report.of("declined")
        assert why in note.why, note.why


@pytest.mark.slow  # compiles the operations of two programs
def test_a_loop_nests_by_the_root_of_its_length_and_keeps_less() -> None:
    def scanned(params: Any, x: Any) -> Any:
        return jax.lax.scan(lambda x, w: (layer(x, w), jnp.sum(x)), x, params["all"], reverse=True)

    stream = 3 * 7 * 12 * 4
    for apply, layers, more in ((plain, 6, {}), (scanned, 1, {"all": stacked_by(6)})):
        jaxpr, report = check(*model(apply, layers, **more), nesting="sqrt")
        assert scans(jaxpr) == [2, 3] and remats(jaxpr) == [False]
        assert f"5 are kept at a time, not 6: {stream} bytes less" in str(report)


def test_a_number_of_layers_without_a_divisor_does_not_nest() -> None:
    jaxpr, report = roll(*model(plain, 5), nesting="sqrt")
    assert scans(jaxpr) == [5] and "5 has no divisor but itself" in str(report)
    loss, args = model(lambda params, x: jax.lax.scan(turn, x, params["all"])[0], 1, all=stacked_by(5))
    jaxpr, report = roll(loss, args, nesting="sqrt")
    assert scans(jaxpr) == [5] and "5 has no divisor but itself" in str(report)
