"""A small language model trained on real text in eight bits, against the same training in floats.

    python -m tests.benchmarks.quantize --train

A Llama of two layers reads the docstrings of Python's own standard library, byte by byte, for 300 steps, on
one CPU: in float32, in int8, in int8 with gradients rounded stochastically, in fp8 (e4m3 forward, e5m2
backward), and in fp8 with delayed scaling. All runs start with the same weights and take the same batches.
Printed is every 50 steps the mean loss of the 25 before it, and at the end the largest difference from the
floats' mean over any 25 steps. It has to lie within BAND; else the exit code is 1.
"""

from __future__ import annotations

import ast
import functools
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from xform import Plan, parallelize
from xform.models import llama
from xform.passes.quantize import Quantize

STEPS, BATCH, LENGTH, SEED = 300, 8, 64, 0
SMOOTHED, SHOWN = 25, 50
BAND = 0.03
"""The difference of smoothed losses, in nats a byte, that a recipe may make."""

SIZE = llama.Config(256, 2, 96, 6, 6, 16, 256, dtype="float32", remat=False)
BYTES = 2_000_000
STOCHASTIC = {"stochastic": {"base": "int8", "rounding": "stochastic"}}
RUNS: dict[str, tuple[Quantize, ...]] = {
    "float32": (),
    "int8": (Quantize("int8"),),
    "int8 stochastic": (Quantize("stochastic", recipes=STOCHASTIC),),
    "fp8": (Quantize("fp8"),),
    "fp8 delayed": (Quantize("fp8_delayed"),),
}


def docstrings() -> Iterator[str]:
    """Of the standard library's modules, classes and functions, by file name and line."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.glob("*.py")) + sorted(root.glob("[a-z]*/*.py")):
        if "site-packages" in path.parts or path.parent.name.startswith("test"):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        documented = (node for node in ast.walk(tree) if isinstance(node, kinds))
        yield from filter(None, map(ast.get_docstring, documented))


@functools.cache
def text() -> np.ndarray:
    """The docstrings' bytes, as tokens."""
    found = bytearray()
    for each in docstrings():
        found += each.encode() + b"\n\n"
        if len(found) > BYTES:
            break
    return np.frombuffer(bytes(found), np.uint8).astype(np.int32)


def batches() -> Iterator[dict[str, np.ndarray]]:
    """Rows of the text, drawn at random places, always the same."""
    data = text()
    rng = np.random.default_rng(SEED)
    for _ in range(STEPS):
        starts = rng.integers(0, len(data) - LENGTH - 1, BATCH)
        rows = np.stack([data[start : start + LENGTH + 1] for start in starts])
        weights = np.ones((BATCH, LENGTH), np.float32)
        yield {"inputs": rows[:, :-1], "targets": rows[:, 1:], "weights": weights}


def losses(passes: tuple[Quantize, ...]) -> np.ndarray:
    """Of each step."""
    options: dict[str, Any] = {"size": SIZE, "batch": BATCH, "length": LENGTH}
    fn, _ = llama.train_step(**options)
    init, args = llama.init(**options, abstract=False, seed=SEED)
    state = jax.jit(init)(*args)
    step = parallelize(fn, Plan({"data": 1}, passes), devices=jax.devices()[:1], donate_argnums=0)
    found = []
    for n, batch in enumerate(batches()):
        if n <= 1 and passes:  # with histories to begin with, and again when they have begun
            state, batch = step.place(state, batch)
        state, metrics = step(state, batch)
        found.append(metrics["loss"])
    return np.asarray([float(loss) for loss in found])


def smoothed(values: np.ndarray) -> np.ndarray:
    return np.convolve(values, np.ones(SMOOTHED) / SMOOTHED, mode="valid")


def main() -> int:
    counts = range(SHOWN, STEPS + 1, SHOWN)
    print(f"{'loss after':16} {' '.join(f'{n:>7}' for n in counts)}   largest   s")
    reference: np.ndarray | None = None
    outside = False
    for name, passes in RUNS.items():
        start = time.perf_counter()
        curve = smoothed(losses(passes))
        reference = curve if reference is None else reference
        apart = float(np.abs(curve - reference).max())
        outside |= not apart <= BAND  # which no number is not either
        shown = " ".join(f"{curve[n - SMOOTHED]:7.4f}" for n in counts)
        print(f"{name:16} {shown}  {apart:8.4f} {time.perf_counter() - start:3.0f}", flush=True)
    print(f"{'outside' if outside else 'within'} the band of {BAND}")
    return int(outside)


if __name__ == "__main__":
    sys.exit(main())
