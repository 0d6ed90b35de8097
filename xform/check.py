"""Runs the original program on one device and the rewritten one on N, and compares what comes out.

A training step (its first result is its first argument's next value) is run several times, state fed back; a
loss (a float scalar) is compared with its gradients by the first argument; anything else by its results.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xform.api import Parallelized, parallelize
from xform.axes import find_axes
from xform.errors import PlanError, RewriteError
from xform.higher_order import equations
from xform.plan import Plan
from xform.roles import find_roles
from xform.targets import materialize
from xform.trace import Jaxpr, shape_of

TOLERANCE = {
    # Sums over devices are taken in another order: a few units in the last place of what is summed, and the
    # optimizer's division by a root of small second moments makes more of them.
    "float64": 1e-8,
    "float32": 2e-4,
    # 8 and 11 bits of significand: results of layers differ by a few units in the last place.
    "bfloat16": 6e-2,
    "float16": 1e-2,
}
"""Largest error allowed, relative to the tensor's largest value, by the coarsest float type in the
program.
"""


CONDITIONING = 4.0
"""A tensor beyond the tolerance still agrees when the original, its arguments nudged, moves a fourth as far:
a gradient that is nothing but rounding, which Adam then blows up to a full step. The nudge is what summing in
another order amounts to: for sums of n terms, the square root of n units in the last place (Higham, Accuracy
and Stability, 4.2)."""

COPIES = 4
"""Of the arguments, held at once: the original's, the rewritten program's, and the results of each."""

NUDGES = 3
"""How many times the original is nudged; the largest move counts."""


@dataclasses.dataclass(frozen=True)
class Result:
    """Errors are over all compared tensors: absolute, and relative to the largest value of the tensor.

    first_difference: the first tensor beyond what is allowed, as `step 2: [0].params['w']`, or None. worst:
    the tensor with the largest relative error. excused: tensors beyond the tolerance but within CONDITIONING
    times what the original moves them by itself when its arguments are nudged. devices: how many the
    rewritten program ran on. steps: how many calls. split: inputs that lie in parts on them. changed:
    equations that the plan's passes added or took away; with none split and none changed, the original was
    compared with itself. not_finite: tensors of the original in which something is NaN or infinite,
    which agrees with the same in the other. alike: the passes that change numbers by intent, which the one
    device ran too.
    """

    ok: bool
    max_abs_error: float
    max_rel_error: float
    first_difference: str | None
    tolerance: float
    compared: int
    kind: str
    worst: str = ""
    excused: int = 0
    devices: int = 1
    steps: int = 1
    split: int = 0
    changed: int = 0
    not_finite: int = 0
    alike: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As the values of JSON, which has no infinity: an error that is infinite is None."""
        data = dataclasses.asdict(self)
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in data.items()}

    def __str__(self) -> str:
        excused = f", {self.excused} of {self.compared} tensors excused" if self.excused else ""
        lines = [f"agrees{excused}" if self.ok else f"DIFFERS, first at {self.first_difference}{excused}"]
        turns = f", {self.steps} steps" if self.steps > 1 else ""
        lines.append(
            f"compared   {self.compared} tensors ({self.kind}{turns}), on {_count(self.devices, 'device')} "
            f"against the original on one{self._alike()}"
        )
        lines.append(
            f"plan       {_count(self.split, 'input')} in parts over the devices, "
            f"{_count(self.changed, 'equation')} added or taken away"
        )
        if self.compared:
            lines.append(
                f"error      at most {self.max_rel_error:.3g} of a tensor's largest value, at {self.worst} "
                f"(allowed {self.tolerance:g}); {self.max_abs_error:.3g} absolute"
            )
        if self.excused:
            fewer = "; --steps 1 compares before steps multiply it" if self.steps > 1 else ""
            lines.append(
                f"excused    {_count(self.excused, 'tensor')} beyond what is allowed, where the original, "
                f"nudged by rounding, itself moves as far{fewer}"
            )
        if self.not_finite:
            lines.append(
                f"note       {_count(self.not_finite, 'tensor')} of the original are not finite: NaN was "
                "compared with NaN"
            )
        if not self.compared:
            lines.append("note       the program returns nothing: nothing was compared")
        elif not (self.split or self.changed):
            lines.append("note       the plan left this program as it was: it was compared with itself")
        return "\n".join(lines)

    def _alike(self) -> str:
        """What the original was given too, since it changes numbers by intent."""
        return f", with {' and '.join(self.alike)} alone" if self.alike else ""


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def check(
    fn: Callable[..., Any],
    args: Sequence[Any],
    plan: Plan,
    *,
    devices: Sequence[Any] | None = None,
    steps: int = 3,
    tolerance: float | None = None,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> Result:
    """Compares `fn(*args)` on one device with `parallelize(fn, plan)(*args)` on `devices` (default: all).

    args: arrays, or ShapeDtypeStructs, for which arrays are made (`xform.targets.materialize`). steps: how
    many times a training step is run. tolerance: relative to each tensor's largest value, and taken at
    its word; by default that of the coarsest float type, with rounding excused (CONDITIONING). `progress`
    is told what is going on. Passes that change numbers by intent (`exact = False`: Quantize) are given to
    the one device too: what is compared is what the rest of the plan makes of it. Raises PlanError where the
    arguments would not fit into this machine's memory.
    """
    tell = progress or (lambda line: None)
    _check_memory(args)
    fn, kind = _comparable(fn, args)
    jaxpr = jax.make_jaxpr(fn)(*args)
    roles = find_roles(find_axes(jaxpr), plan.axes, [jax.tree_util.keystr(p) for p, _ in _flat(tuple(args))])
    args = materialize(tuple(args), jaxpr, roles, seed)
    allowed = tolerance if tolerance is not None else _tolerance(jaxpr)
    rewritten = parallelize(fn, plan, devices=devices)
    tell("tracing and rewriting")
    program = rewritten.trace(*args)
    here = jax.devices("cpu")[0] if devices is None else next(iter(devices))
    turns = steps if kind == "training step" else 1
    by_intent = [p for p in plan.passes if not getattr(p, "exact", True)]
    original = parallelize(fn, Plan({"data": 1}, by_intent), devices=[here]) if by_intent else jax.jit(fn)
    compare = _Comparison(allowed)
    tell(f"running the original on one device: {kind}")
    expected = list(_run(original, _placed(original, jax.device_put(args, here)), turns))
    tell(f"running the rewritten program on {rewritten.mesh.size} devices")
    for turn, (want, got) in enumerate(
        zip(expected, _run(rewritten, _placed(rewritten, tuple(args)), turns), strict=True)
    ):
        compare.trees(want, got, f"step {turn + 1}: " if kind == "training step" else "")
    if tolerance is None and compare.beyond():
        tell(f"{len(compare.beyond())} tensors differ: is it rounding? nudging the original {NUDGES} times")
        for nudge in range(NUDGES):
            nudged = jax.device_put(_nudged(args, _longest_sum(jaxpr) ** 0.5, seed + nudge), here)
            nudged = _placed(original, nudged)
            for turn, (want, moved) in enumerate(zip(expected, _run(original, nudged, turns), strict=True)):
                compare.conditioning(want, moved, f"step {turn + 1}: " if kind == "training step" else "")
    return dataclasses.replace(
        compare.result(kind),
        devices=rewritten.mesh.size,
        steps=turns,
        split=sum(s is not None and not s.is_fully_replicated for s in program.in_shardings),
        changed=sum(_changes(stage.before, stage.after) for stage in program.stages),
        alike=tuple(type(p).__name__.lower() for p in by_intent),
    )


def _changes(before: Jaxpr, after: Jaxpr) -> int:
    """How many equations were added or taken away, told by what they are called."""
    counts = Counter(eqn.primitive.name for eqn in equations(after))
    counts.subtract(eqn.primitive.name for eqn in equations(before))
    return sum(map(abs, counts.values()))


def _check_memory(args: Sequence[Any]) -> None:
    """Both programs run here, arguments and results at once: better a word than a machine that swaps."""
    needed = COPIES * sum(math.prod(np.shape(x)) * jnp.result_type(x).itemsize for x in jax.tree.leaves(args))
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > there:
        raise PlanError(
            f"check runs both programs on this machine, which has {there / 1e9:.0f} GB of memory; their "
            f"arguments and results alone take about {needed / 1e9:.0f} GB: check a smaller size of the model"
        )


def _run(step: Callable[..., Any], args: tuple[Any, ...], turns: int) -> Iterator[Any]:
    """The results of `turns` calls, each starting from the state that the last one returned."""
    for turn in range(turns):
        out = step(*args)
        if turn + 1 < turns:
            args = (out[0] if isinstance(out, tuple) else out, *args[1:])
        yield jax.tree.map(_host, step.unplace(out) if isinstance(step, Parallelized) else out)


def _nudged(args: Any, units: float, seed: int) -> Any:
    """The arguments with every float moved up or down by that many units in the last place."""
    rng = np.random.default_rng(seed)

    def nudge(x: Any) -> Any:
        if not jnp.issubdtype(jnp.result_type(x), jnp.floating):
            return x
        sign = jnp.asarray(rng.choice([-1, 1], np.shape(x)), x.dtype)
        return (x + x * sign * (units * jnp.finfo(x.dtype).eps)).astype(x.dtype)

    return jax.tree.map(nudge, args)


def _placed(step: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments as a step takes them, the ranges that it keeps calibrated on them."""
    if not isinstance(step, Parallelized):
        return args
    if any(kept.initial is None for kept in step.trace(*args).kept):
        args = (step.calibrate(args[0], [args[1:]]), *args[1:])
    placed = step.place(*args)
    return placed if len(args) > 1 else (placed,)


def _comparable(fn: Callable[..., Any], args: Sequence[Any]) -> tuple[Callable[..., Any], str]:
    """What to run and compare for `fn`: itself, or, for a loss, its value and gradients."""
    out = jax.eval_shape(fn, *args)
    first = out[0] if isinstance(out, tuple) and out else out
    if args and _same_types(first, args[0]):
        return fn, "training step"
    scalar = isinstance(first, jax.ShapeDtypeStruct) and first.shape == ()
    if scalar and jnp.issubdtype(first.dtype, jnp.floating) and args and _differentiable(args[0]):
        has_aux = isinstance(out, tuple)
        if has_aux and len(out) != 2:
            return fn, "results"
        return jax.value_and_grad(fn, has_aux=has_aux), "loss and gradients"
    return fn, "results"


def _same_structure(a: Any, b: Any) -> bool:
    first: Any = jax.tree.structure(a)
    return bool(first == jax.tree.structure(b))


def _same_types(a: Any, b: Any) -> bool:
    if not jax.tree.leaves(a) or not _same_structure(a, b):
        return False
    return all(
        np.shape(x) == np.shape(y) and jnp.result_type(x) == jnp.result_type(y)
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def _differentiable(tree: Any) -> bool:
    leaves = jax.tree.leaves(tree)
    return bool(leaves) and all(jnp.issubdtype(jnp.result_type(x), jnp.inexact) for x in leaves)


def _tolerance(jaxpr: Jaxpr) -> float:
    """By the coarsest float type among the results of all equations."""
    found = {str(getattr(v.aval, "dtype", "")) for eqn in equations(jaxpr) for v in eqn.outvars}
    present = [TOLERANCE[name] for name in TOLERANCE if name in found]
    return max(present, default=TOLERANCE["float32"])


def _longest_sum(jaxpr: Jaxpr) -> int:
    """The number of terms of the longest contraction or sum."""
    longest = 1
    for eqn in equations(jaxpr):
        summed: Sequence[int] = ()
        if eqn.primitive.name == "dot_general":
            summed = eqn.params["dimension_numbers"][0][0]
        elif eqn.primitive.name == "reduce_sum":
            summed = eqn.params["axes"]
        longest = max(longest, math.prod(shape_of(eqn.invars[0])[d] for d in summed) if summed else 1)
    return longest


def _flat(tree: Any) -> list[Any]:
    return jax.tree_util.tree_flatten_with_path(tree)[0]


class _Comparison:
    """Errors by tensor, each with the tensor's scale and how far the original itself moves when nudged."""

    def __init__(self, tolerance: float) -> None:
        self.tolerance = tolerance
        self.errors: dict[str, tuple[float, float]] = {}
        self.moves: dict[str, float] = {}
        self.not_finite = 0

    def trees(self, expected: Any, got: Any, prefix: str) -> None:
        if not _same_structure(expected, got):
            raise RewriteError(
                f"the rewritten program returns {jax.tree.structure(got)},"
                f" the original {jax.tree.structure(expected)}"
            )
        for (path, x), (_, y) in zip(_flat(expected), _flat(got), strict=True):
            name = prefix + (jax.tree_util.keystr(path) or "result")
            self.errors[name] = (_distance(x, y), _scale(x))
            self.not_finite += x.dtype.kind in "fc" and not np.isfinite(x).all()

    def conditioning(self, expected: Any, moved: Any, prefix: str) -> None:
        for (path, x), (_, y) in zip(_flat(expected), _flat(moved), strict=True):
            name = prefix + (jax.tree_util.keystr(path) or "result")
            self.moves[name] = max(_distance(x, y), self.moves.get(name, 0.0))

    def beyond(self) -> list[str]:
        """The tensors beyond what is allowed, in order."""
        return [
            name
            for name, (error, scale) in self.errors.items()
            if not error <= max(self.tolerance * scale, CONDITIONING * self.moves.get(name, 0.0))
        ]

    def result(self, kind: str) -> Result:
        relative = {name: _relative(*pair) for name, pair in self.errors.items()}
        worst = max(relative, key=lambda name: relative[name], default="")
        beyond = self.beyond()
        excused = sum(relative[name] > self.tolerance for name in self.errors) - len(beyond)
        return Result(
            not beyond,
            max((error for error, _ in self.errors.values()), default=0.0),
            relative.get(worst, 0.0),
            beyond[0] if beyond else None,
            self.tolerance,
            len(self.errors),
            kind,
            worst,
            excused,
            not_finite=self.not_finite,
        )


def _distance(a: np.ndarray, b: np.ndarray) -> float:
    """The largest difference; infinite where types differ, or one is not finite and the other is another
    thing.
    """
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    if not a.size:
        return 0.0
    if a.dtype.kind not in "fc":
        return float(np.max(np.abs(a.astype(np.float64) - b.astype(np.float64))))
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore"):
        error = np.where(same, 0.0, np.abs(a - b))
    return float("inf") if np.isnan(error).any() else float(np.max(error))


def _scale(a: np.ndarray) -> float:
    finite = np.abs(a[np.isfinite(a)]) if a.dtype.kind in "fc" else np.abs(a.astype(np.float64))
    return float(finite.max()) if finite.size else 0.0


def _relative(error: float, scale: float) -> float:
    return error / scale if scale else (0.0 if error == 0 else float("inf"))


def _host(x: Any) -> np.ndarray:
    """The whole value as numpy: floats of any width in double, the rest as it is."""
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    x = jax.device_get(x)
    if jnp.issubdtype(x.dtype, jnp.floating):
        return np.asarray(x, np.float64)
    return np.asarray(x)
