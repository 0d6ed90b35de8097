"""Steps that take their weights as codes: the same results, fewer bytes, never whole; and what says no."""

import math
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from xform import Plan, PlanError, Quantize, Quantized, Roll, Shard, hlo, parallelize, topologies
from xform.aot import compile_lowered
from xform.higher_order import equations
from xform.models import llama
from xform.quantization.arrays import whole

RECIPES: dict[str, tuple[str, dict[str, Any]]] = {
    "int8_weights": ("int8_weights", {}),
    # ranges a little wider, so that no number lies on the border of two codes
    "int8_forward": (
        "wide",
        {
            "wide": {
                "base": "int8_forward",
                "activations_calibration": "absmax,1.01",
                "weights_calibration": "absmax,1.01",
            }
        },
    ),
    "int4": ("short", {"short": {"base": "int4_weights", "block": 16}}),
    "nf4": ("short", {"short": {"base": "nf4_weights", "block": 16}}),
    "fp8_weights": ("fp8_weights", {}),
    "one scale": ("one", {"one": {"base": "int8_weights", "channels": False}}),
    "minmax": ("zero", {"zero": {"base": "int8_weights", "weights_calibration": "minmax"}}),
}


def numbers(tree: Any, seed: int = 0) -> Any:
    """Arrays for shapes: small numbers, and integers that count."""
    rng = np.random.RandomState(seed)

    def one(x: Any) -> Any:
        if jnp.issubdtype(x.dtype, jnp.floating):
            return jnp.asarray(0.2 * rng.standard_normal(x.shape), x.dtype)
        return jnp.asarray(np.arange(math.prod(x.shape)).reshape(x.shape) % 7, x.dtype)

    return jax.tree.map(one, tree)


def serving(
    fn: Any, *passes: Any, mesh: dict[str, int] | None = None, batch: str = "", **options: Any
) -> Any:
    """batch: the dimension of an argument that is one, for functions of which nothing tells."""
    mesh = mesh or {"data": 1}
    plan = Plan(mesh, passes, axes={"batch": batch} if batch else {})
    return parallelize(fn, plan, devices=jax.devices()[: math.prod(mesh.values())], **options)


def nbytes(tree: Any) -> float:
    """What arrays take; numbers of four bits take half a byte."""

    def bits(dtype: Any) -> int:
        info = jnp.finfo if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo
        return int(info(dtype).bits)

    return sum(x.size * bits(x.dtype) / 8 for x in jax.tree.leaves(tree))


def is_codes(x: Any) -> bool:
    return isinstance(x, Quantized)


def agree(found: Any, wanted: Any, tolerance: float = 0.0) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * float(np.abs(b).max()))


FORWARD, SHAPES = llama.forward(size="tiny", batch=2, length=16)
ARGS = numbers(SHAPES)


@pytest.mark.parametrize("recipe", RECIPES)
def test_given_codes_a_step_gives_what_it_does_when_it_makes_them_itself(recipe: str) -> None:
    name, own = RECIPES[recipe]
    step = serving(FORWARD, Quantize(name, recipes=own))
    codes = step.quantize(*ARGS)
    assert sum(map(is_codes, jax.tree.leaves(codes, is_leaf=is_codes))) == 7
    agree(step(codes, *ARGS[1:]), step(*ARGS))


@pytest.mark.parametrize(
    ("recipe", "most"), [("int8_weights", 0.27), ("fp8_weights", 0.27), ("int4", 0.19), ("nf4", 0.19)]
)
def test_weights_as_codes_take_fewer_bytes(recipe: str, most: float) -> None:
    name, own = RECIPES[recipe]
    codes = serving(FORWARD, Quantize(name, recipes=own)).quantize(*ARGS)
    pairs = zip(
        jax.tree.leaves(codes, is_leaf=is_codes),
        jax.tree.leaves(ARGS[0]),
        strict=True,
    )
    made = [(q, x) for q, x in pairs if isinstance(q, Quantized)]
    assert len(made) == 7
    assert nbytes([q for q, _ in made]) <= most * nbytes([x for _, x in made])


def test_what_is_no_weight_of_a_product_stays_as_it_is() -> None:
    step = serving(FORWARD, Quantize("int8_weights", rules={"mlpwo": "none"}))
    codes = step.quantize(*ARGS)
    assert codes["embed"]["embedding"] is ARGS[0]["embed"]["embedding"]
    assert codes["head"]["kernel"] is ARGS[0]["head"]["kernel"]  # left in floats by default
    assert not isinstance(codes["layers"]["mlp"]["down"]["kernel"], Quantized)
    assert isinstance(codes["layers"]["mlp"]["up"]["kernel"], Quantized)


def test_weights_of_different_recipes_are_stored_each_in_its_own_way() -> None:
    step = serving(FORWARD, Quantize("int8_weights", rules={"mlp*": "fp8_weights", "logits": "int8_weights"}))
    codes = step.quantize(*ARGS)
    assert codes["layers"]["mlp"]["up"]["kernel"].codes.dtype == jnp.float8_e4m3fn
    assert codes["layers"]["attention"]["out"]["kernel"].codes.dtype == jnp.int8
    assert codes["head"]["kernel"].scale.shape == (1, 320)
    agree(step(codes, *ARGS[1:]), step(*ARGS))


def test_a_step_that_decodes_takes_codes() -> None:
    fn, shapes = llama.decode_step(size="tiny", batch=2, length=8)
    args = numbers(shapes)
    step = serving(fn, Quantize("int8_weights"), donate_argnums=1)
    codes = step.quantize(*args)
    first = step(codes, jax.tree.map(jnp.copy, args[1]), *args[2:])
    agree(first, step(args[0], jax.tree.map(jnp.copy, args[1]), *args[2:]))


def test_layers_that_are_rolled_into_a_loop_store_their_codes_stacked() -> None:
    fn, shapes = llama.decode_step(size="tiny", batch=2, length=8, scan=False)
    args = numbers(shapes)
    step = serving(fn, Quantize("int8_weights"), Roll())
    codes = step.quantize(*args)
    placed = step.place(codes, *args[1:])
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(placed[0])[0]]
    assert sum(".codes" in name and "[*]" in name for name in names) == 7
    agree(step.unplace(step(*placed)), serving(fn, Quantize("int8_weights"))(*args))
    agree(step.unplace(placed[0]), codes)
    agree(step.quantize(step.place(*args)[0], *args[1:]), codes)


MESHES: dict[str, dict[str, int]] = {
    "fsdp": {"fsdp": 8},
    "fsdp and tensor": {"fsdp": 4, "tensor": 2},
}


@pytest.mark.parametrize("collectives", ["explicit", "auto"])
@pytest.mark.parametrize("mesh", MESHES)
def test_codes_lie_as_their_weights_do_and_give_the_same_on_any_mesh(mesh: str, collectives: Any) -> None:
    fn, shapes = llama.decode_step(size="tiny", batch=8, length=8)
    args = numbers(shapes)
    step = serving(fn, Quantize("int8_weights"), Shard(collectives=collectives), mesh=MESHES[mesh])
    codes = step.quantize(*args)
    found = step(*step.place(codes, *args[1:]))
    agree(found, serving(fn, Quantize("int8_weights"))(*args), 1e-5)

    def layouts(args: Any) -> dict[str, Any]:
        program = step.trace(*args)
        return {x.path: lies for x, lies in zip(program.inputs, program.in_shardings, strict=True)}

    lie, floats = layouts((codes, *args[1:])), layouts(args)
    kernels = [path for path in lie if path.endswith(".codes")]
    assert len(kernels) == 7
    assert all(lie[path] == floats[path.removesuffix(".codes")] for path in kernels)


@pytest.mark.parametrize(
    ("recipe", "sent"), [("int8_weights", "int8"), ("fp8_weights", "float8_e4m3fn"), ("minmax", "int8")]
)
def test_weights_are_gathered_as_codes(recipe: str, sent: str) -> None:
    name, own = RECIPES[recipe]
    fn, shapes = llama.forward(size="tiny", batch=8, length=128)
    step = serving(fn, Quantize(name, recipes=own), Shard(collectives="explicit"), mesh={"fsdp": 8})
    program = step.trace(step.quantize(*shapes), *shapes[1:])
    gathered = gathers(program)
    assert gathered[sent] == 7
    assert gathered["float32"] == 1  # the head


@pytest.mark.parametrize(("base", "sent"), [("int4_weights", "int4"), ("nf4_weights", "uint4")])
def test_weights_in_blocks_are_gathered_in_four_bits_and_their_scales_alike(base: str, sent: str) -> None:
    fn, shapes = llama.forward(size="tiny", batch=8, length=128)
    own = {"short": {"base": base, "block": 4}}
    step = serving(fn, Quantize("short", recipes=own), Shard(collectives="explicit"), mesh={"fsdp": 8})
    gathered = gathers(step.trace(step.quantize(*shapes), *shapes[1:]))
    assert gathered[sent] == 7 and gathered["float32"] == 1 + 7


def gathers(program: Any) -> Counter[str]:
    """How many matrices and more are gathered, by dtype."""
    found = (e.invars[0].aval for e in equations(program.jaxpr) if e.primitive.name == "all_gather")
    return Counter(str(a.dtype) for a in found if len(a.shape) > 1)


def test_a_checkpoint_of_codes_is_a_tree_of_arrays() -> None:
    step = serving(FORWARD, Quantize("int8_weights"))
    codes = step.quantize(*ARGS)
    saved = {
        jax.tree_util.keystr(p): np.asarray(x) for p, x in jax.tree_util.tree_flatten_with_path(codes)[0]
    }
    assert saved["['layers']['mlp']['up']['kernel'].codes"].dtype == np.int8
    like = step.quantize(*SHAPES)  # without an array
    paths, tree = jax.tree_util.tree_flatten_with_path(like)
    restored = jax.tree.unflatten(tree, [saved[jax.tree_util.keystr(p)] for p, _ in paths])
    agree(step(restored, *ARGS[1:]), step(codes, *ARGS[1:]))


@pytest.mark.parametrize("mesh", [{}, {"fsdp": 4, "tensor": 2}])
def test_codes_go_with_calibrated_ranges_of_activations(mesh: dict[str, int]) -> None:
    step = serving(
        FORWARD, Quantize("int8_static"), *([Shard(collectives="explicit")] if mesh else []), mesh=mesh
    )
    floats = step.calibrate(ARGS[0], [ARGS[1:]])
    codes = step.calibrate(step.quantize(*ARGS), [ARGS[1:]])
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(codes)[0]]
    assert sum(".codes" in path for path in paths) == 7 and sum("quantize[" in path for path in paths) == 4
    agree(step(codes, *ARGS[1:]), step(floats, *ARGS[1:]), 1e-5)


# ---------------------------------------------------------------- the ways of a weight through a program

W = {"a": jnp.asarray(np.random.RandomState(1).standard_normal((3, 16, 16)), jnp.float32) * 0.3}
X = jnp.asarray(np.random.RandomState(2).standard_normal((4, 16)), jnp.float32)


def in_a_scan(p: Any, x: Any) -> Any:
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p["a"])[0]


def carried_by_a_loop(p: Any, x: Any) -> Any:
    def turn(i: Any, state: Any) -> Any:
        p, x = state
        return p, jnp.tanh(x @ p["a"][i])

    return jax.lax.fori_loop(0, 3, turn, (p, x))[1]


def carried_by_a_while(p: Any, x: Any) -> Any:
    def going(state: Any) -> Any:
        return (jnp.abs(state[1]).max() > 0.01) & (state[2] < 5)

    def turn(state: Any) -> Any:
        p, x, n = state
        return p, jnp.tanh(x @ p["a"][n % 3]), n + 1

    return jax.lax.while_loop(going, turn, (p, x, 0))[1]


def in_branches(p: Any, x: Any) -> Any:
    w = p["a"]
    return jax.lax.switch(jnp.int32(1), [lambda x: x @ w[0], lambda x: x @ w[1].T, lambda x: x], x)


def under_jit_and_remat(p: Any, x: Any) -> Any:
    layer = jax.jit(jax.checkpoint(lambda w, x: jnp.tanh(x @ w)))
    return layer(p["a"][2], layer(p["a"][1], layer(p["a"][0], x)))


def side_by_side(p: Any, x: Any) -> Any:
    both = jnp.concatenate([p["a"][0], p["a"][1]], axis=1)
    left, right = jnp.split(x @ both, 2, axis=-1)
    return left * jax.nn.silu(right)


def given_back(p: Any, x: Any) -> Any:
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), w), x, p["a"])[0]


WAYS: list[Callable[..., Any]] = [
    in_a_scan,
    carried_by_a_loop,
    carried_by_a_while,
    in_branches,
    under_jit_and_remat,
    side_by_side,
    given_back,
]


@pytest.mark.parametrize(
    ("fn", "recipe"),
    [
        (fn, recipe)
        for fn in WAYS
        for recipe in ("int8_weights", "int4", "int8_forward")
        if (fn, recipe) != (in_branches, "int8_forward")  # whose scales are others, given
    ],
)
def test_codes_go_the_way_of_their_weight(fn: Any, recipe: str) -> None:
    name, own = RECIPES[recipe]
    step = serving(fn, Quantize(name, recipes=own), batch="[1][0]")
    codes = step.quantize(W, X)
    assert isinstance(codes["a"], Quantized)
    if recipe == "int8_forward":
        agree(step(codes, X), step(W, X), 1e-6)
    else:
        agree(step(codes, X), jax.jit(fn)({"a": whole(codes["a"])}, X), 1e-6)


def test_numbers_share_a_scale_that_do_so_for_any_product_of_the_weight() -> None:
    step = serving(in_branches, Quantize("int8_weights"), batch="[1][0]")
    assert step.quantize(W, X)["a"].scale.shape == (3, 1, 1)


class Dense(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up, self.down = nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 16, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.down(jax.nn.gelu(self.up(x)))


def test_a_state_of_flax_nnx_holds_codes() -> None:
    graph, state = nnx.split(Dense(nnx.Rngs(0)))
    step = serving(lambda state, x: nnx.merge(graph, state)(x), Quantize("int8_weights"), batch="[1][0]")
    codes = step.quantize(state, X)
    assert isinstance(codes["up"]["kernel"].get_value(), Quantized)
    assert str(codes["up"]["kernel"].get_value()) == "Quantized(int8[16, 32], scale float32[1, 32])"
    agree(step(codes, X), step(state, X))


def with_a_penalty(p: Any, x: Any) -> Any:
    return in_a_scan(p, x) @ p["v"] + jnp.sum(p["v"] ** 2)


V = {**W, "v": W["a"][1]}


def test_a_weight_of_which_something_needs_the_floats_stays_in_floats_and_the_step_says_so() -> None:
    step = serving(with_a_penalty, Quantize("int8_weights"), batch="[1][0]")
    with pytest.warns(UserWarning, match=r"\[0\]\['v'\] stay in floats, which integer_pow at .*penalty"):
        codes = step.quantize(V, X)
    assert codes["v"] is V["v"] and isinstance(codes["a"], Quantized)


def test_codes_of_another_checkpoint_work_where_floats_are_needed_too_and_the_report_says_so() -> None:
    def plain(p: Any, x: Any) -> Any:
        return in_a_scan(p, x) @ p["v"]

    codes = serving(plain, Quantize("int8_weights"), batch="[1][0]").quantize(V, X)
    step = serving(with_a_penalty, Quantize("int8_weights"), batch="[1][0]")
    agree(step(codes, X), with_a_penalty(jax.tree.map(whole, codes, is_leaf=is_codes), X), 1e-6)
    said = [note for note, _ in step.trace(codes, X).report if "takes no codes" in note.why]
    assert len(said) == 1 and said[0].what == "[0]['v']"


def test_a_weight_that_is_a_result_stays_in_floats() -> None:
    def gives_back(p: Any, x: Any) -> Any:
        return in_a_scan(p, x), p["a"]

    with pytest.warns(UserWarning, match=r"\[0\]\['a'\] stay in floats, which the function's result needs"):
        assert not is_codes(serving(gives_back, Quantize("int8_weights")).quantize(W, X)["a"])


def test_of_a_recipe_that_keeps_weights_ranges_a_stored_weight_has_its_own() -> None:
    recipe = {"mine": {"base": "int8_delayed", "weights_calibration": "delayed,16,2"}}
    codes = serving(in_a_scan, Quantize("mine", recipes=recipe), batch="[1][0]").quantize(W, X)["a"]
    assert codes.scale.shape == (3, 1, 1)
    np.testing.assert_allclose(codes.scale[:, 0, 0], 2 * jnp.abs(W["a"]).max((1, 2)) / 127.5, rtol=1e-6)


def of_heads(p: Any, x: Any) -> Any:
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w.reshape(16, 16)), None), x, p["h"])[0]


@pytest.mark.parametrize(("block", "scale"), [(1, (3, 8, 2, 16)), (2, (3, 8, 1, 16)), (8, (3, 2, 1, 16))])
def test_blocks_have_as_many_numbers_as_the_recipe_says_however_the_weight_lies(
    block: int, scale: tuple[int, ...]
) -> None:
    own = {"mine": {"base": "int4_weights", "block": block}}
    codes = serving(of_heads, Quantize("mine", recipes=own), batch="[1][0]").quantize(
        {"h": W["a"].reshape(3, 8, 2, 16)}, X
    )
    assert codes["h"].scale.shape == scale


def test_blocks_that_do_not_divide_a_weight_as_it_lies_are_an_error_that_names_it() -> None:
    own = {"mine": {"base": "int4_weights", "block": 8}}
    step = serving(
        lambda p, x: of_heads({"h": p["h"].reshape(3, 4, 4, 16)}, x),
        Quantize("mine", recipes=own),
        batch="[1][0]",
    )
    assert step.quantize({"h": W["a"].reshape(3, 4, 4, 16)}, X)["h"].scale.shape == (3, 2, 1, 16)
    odd = {"h": jnp.ones((2, 4, 6, 24))}
    step = serving(
        lambda p, x: jax.lax.scan(lambda x, w: (x @ w.reshape(24, 24), None), x, p["h"])[0],
        Quantize("mine", recipes=own),
        batch="[1][0]",
    )
    with pytest.raises(
        PlanError, match=r"blocks of 8 do not divide \[0\]\['h'\], of which .* contracts 4 x 6"
    ):
        step.quantize(odd, jnp.ones((4, 24)))


def test_a_rule_of_the_users_own_is_not_lost_in_silence() -> None:
    @jax.custom_vjp
    def stopped(x: Any, w: Any) -> Any:
        return x @ w

    def back(saved: Any, _: Any) -> Any:
        return jax.tree.map(jnp.zeros_like, saved)

    stopped.defvjp(lambda x, w: (x @ w, (x, w)), back)
    step = serving(
        lambda p, x: jnp.tanh(stopped(in_a_scan(p, x), p["v"])), Quantize("int8_weights"), batch="[1][0]"
    )
    codes = step.quantize(V, X)
    assert is_codes(codes["v"]) and step(codes, X).shape == X.shape
    with pytest.raises(PlanError, match="from outside, through a function with a rule of its own"):
        jax.grad(lambda x: step(codes, x).sum())(X)


def test_what_cannot_be_quantized_beside_given_codes_is_told() -> None:
    fn, shapes, x, _ = MORE["images"]
    p, x = numbers((shapes, x))
    own = {"mine": {"base": "int8_weights", "block": 3}}
    step = serving(fn, Quantize("mine", recipes=own))
    codes = step.quantize(p, x)
    assert is_codes(codes["head"]) and not is_codes(codes["kernel"])
    said = [note.why for note, _ in step.trace(codes, x).report if note.kind == "declined"]
    assert any("contracts no dimension that blocks could be along" in why for why in said)
    agree(step(codes, x), step(p, x), 1e-6)


def test_a_program_that_learns_beside_given_codes_differentiates_through_them() -> None:
    """As with low-rank adapters beside weights that stay as they are."""

    def loss(adapters: Any, p: Any, x: Any) -> Any:
        def layer(x: Any, each: Any) -> Any:
            w, (down, up) = each
            return jnp.tanh(x @ w + x @ down @ up), None

        return jnp.sum(jax.lax.scan(jax.checkpoint(layer), x, (p["a"], adapters))[0] ** 2)

    adapters = numbers((jnp.zeros((3, 16, 2)), jnp.zeros((3, 2, 16))))
    codes = serving(in_a_scan, Quantize("int8_weights")).quantize(W, X)
    step = serving(jax.value_and_grad(loss), Quantize("int8_weights"), batch="[2][0]")
    found = step(adapters, codes, X)
    agree(found, jax.value_and_grad(loss)(adapters, {"a": whole(codes["a"])}, X), 1e-5)
    dots = str(step.trace(adapters, codes, X).jaxpr)
    assert "i8[3,16,16]" in dots and not re.search(r"f32\[3,16,16\] = mul", dots)


# ---------------------------------------------------------------- experts and convolutions


def experts(p: Any, x: Any) -> Any:
    chosen = jnp.argmax(x @ p["router"], -1)
    order = jnp.argsort(chosen)
    sizes = jnp.bincount(chosen, length=3).astype(jnp.int32)
    hidden = jax.nn.relu(jax.lax.ragged_dot(x[order], p["up"], sizes))
    return jax.lax.ragged_dot(hidden, p["down"], sizes)[jnp.argsort(order)]


def images(p: Any, x: Any) -> Any:
    dims = ("NHWC", "HWIO", "NHWC")
    hidden = jax.lax.conv_general_dilated(x, p["kernel"], (1, 1), "SAME", dimension_numbers=dims)
    return jax.nn.relu(hidden).mean((1, 2)) @ p["head"]


MORE = {
    "experts": (
        experts,
        {"router": jnp.zeros((16, 3)), "up": jnp.zeros((3, 16, 8)), "down": jnp.zeros((3, 8, 16))},
        jnp.zeros((12, 16)),
        {"up": (1, 1, 8), "down": (1, 1, 16)},
    ),
    "images": (
        images,
        {"kernel": jnp.zeros((3, 3, 4, 6)), "head": jnp.zeros((6, 5))},
        jnp.zeros((2, 8, 8, 4)),
        {"kernel": (1, 1, 1, 6), "head": (1, 5)},
    ),
}


@pytest.mark.parametrize("recipe", ["int8_weights", "int8_forward"])
@pytest.mark.parametrize("name", MORE)
def test_products_by_expert_and_convolutions_take_codes(name: str, recipe: str) -> None:
    fn, shapes, x, scales = MORE[name]
    p, x = numbers((shapes, x))
    step = serving(fn, Quantize(recipe))
    codes = step.quantize(p, x)
    assert {k: q.scale.shape for k, q in codes.items() if isinstance(q, Quantized)} == scales
    agree(step(codes, x), step(p, x))


# ---------------------------------------------------------------- what says no


def test_codes_without_a_pass_that_takes_them_are_an_error() -> None:
    codes = serving(in_a_scan, Quantize("int8_weights")).quantize(W, X)
    with pytest.raises(PlanError, match=r"\[0\]\['a'\]: given as codes .* add quantize"):
        serving(in_a_scan)(codes, X)


def test_which_weights_become_codes_follows_from_the_whole_program() -> None:
    step = serving(in_a_scan, Quantize("int8_weights"))
    with pytest.raises(PlanError, match="in_a_scan was not traced with arguments of these types"):
        step.quantize(W)
    step.trace(W, X)
    assert isinstance(step.quantize(W)["a"], Quantized)


def test_a_step_that_does_not_serve_has_no_weights_to_store() -> None:
    fn, shapes = llama.train_step(size="tiny", batch=2, length=16)
    with pytest.raises(
        PlanError, match=r"step has no weights to be stored as codes: .* or it differentiates"
    ):
        serving(fn, Quantize("int8")).quantize(*shapes)
    with pytest.raises(PlanError, match="its plan has no quantize"):
        serving(in_a_scan).quantize(W, X)


def test_two_recipes_of_one_weight_are_an_error_that_names_it() -> None:
    def fn(p: Any, x: Any) -> Any:
        with jax.named_scope("first"):
            y = x @ p["w"]
        with jax.named_scope("second"):
            return y @ p["w"]

    rules = {"where:first": "int8_weights", "where:second": "fp8_weights"}
    step = serving(fn, Quantize("none", rules=rules), batch="[1][0]")
    with pytest.raises(PlanError, match=r"several products want \[0\]\['w'\] quantized in different ways"):
        step.quantize({"w": W["a"][0]}, X)


# ---------------------------------------------------------------- as compiled


@pytest.mark.parametrize("recipe", ["int8_weights", "nf4_weights"])
def test_on_a_tpu_no_weight_is_made_whole(recipe: str) -> None:
    """Floats of a weight are made where they are multiplied, in one fusion with the product; of weights in
    blocks those of a layer may be in the chip's own memory, but not in the device's.
    """
    given = ({"a": jnp.zeros((4, 1024, 1024), jnp.bfloat16)}, jnp.zeros((8, 1, 1024), jnp.bfloat16))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), given)
    topology = topologies.parse("v5e-1")
    plan = Plan({"data": 1}, [Quantize(recipe)], axes={"batch": "[1][0]"})
    step = parallelize(in_a_scan, plan, devices=topology.devices())
    lowered = step.lower(step.quantize(*shapes), shapes[1])
    result = compile_lowered(lowered.lowered, topology=topology, mesh=step.mesh, full=True)
    module = hlo.parse(result.hlo_text)
    every = [i for computation in module.computations.values() for i in computation]
    fused = {i.called for i in every if i.opcode == "fusion"}
    bodies = [computation for name, computation in module.computations.items() if name not in fused]
    arrays = [a for body in bodies for i in body for a in hlo.arrays(i.type)]
    assert any(a.bits <= 8 and math.prod(a.dims) == 4 * 1024 * 1024 for a in arrays)
    floats = [a for a in arrays if a.bits > 8 and math.prod(a.dims) >= 1024 * 1024 // 4]
    assert not [a for a in floats if recipe == "int8_weights" or a.space == 0]
    assert not [a for a in floats if math.prod(a.dims) > 1024 * 1024]
