"""Who may import whom, read from the source: the picture of the design, held."""

import ast
import functools
import importlib
import os
import pathlib
import subprocess
import sys
import types

import pytest

CHECKOUT = pathlib.Path(__file__).parents[1]

# The modules of xform, lowest first. A module imports only from rows above its own; a package is one row.
LAYERS = (
    "errors",  # the three kinds of error
    "faults",  # whose fault an exception is, and what is said of it
    "report",  # notes on what was done
    "trace",  # functions to jaxprs and back; the one importer of jax._src
    "higher_order",  # the equations that hold bodies
    "flops",  # the arithmetic a program asks for
    "rewrite",  # the engine
    "ops",  # high-level operations, an equation each
    "derivative",  # a program's derivative as two programs
    "movement",  # values made of others by moving and converting alone
    "graph",  # a jaxpr as a graph
    "printing",  # programs as text, diffs, pages
    "axes",  # which dimensions are the same axis
    "threefry",  # random bits of some elements of an array
    "regions",  # what works element by element
    "roles",  # what each axis is, and each input
    "batch",  # what becomes of the rows of a batch
    "heads",  # where logits are made, and the region up to where they are reduced
    "layers",  # where the program repeats
    "tensors",  # what each tensor is
    "raising",  # high-level operations, recognised
    "experts",  # tokens sorted by expert, as one operation
    "slices",  # slices of products, taken before them
    "rotations",  # halves of heads, rotated by a product
    "state",  # which inputs are kept stacked, and both trees
    "registry",  # names to passes
    "schedules",  # schedules of pipelines as tables
    "values",  # options: checked, frozen, written
    "plan",  # Plan, Pass; TOML
    "plans",  # presets
    "topologies",  # TPU slices and meshes
    "quantization",  # arrays in eight bits and fewer, products of them, what they take
    "context",  # what a pass is told
    "sharding",  # rules to layouts, constraints, arrays on a mesh
    "spmd",  # a program from the view of one shard, its collectives written out
    "ordering",  # the state stored in the order of stages
    "hlo",  # the compiled module, read
    "promises",  # the compiled module, held to what was promised
    "aot",  # compile for a topology
    "program",  # a traced and rewritten function, and how its arguments lie
    "kept",  # what passes keep from call to call, between a program and its arguments
    "memory",  # what a step takes, and what of it to keep within a budget
    "pipeline",  # layers over stages: a schedule's table as loops of ticks
    "making",  # tracing, passes and the stacking of the state, in order
    "api",  # parallelize
    "targets",  # module:factory on the command line
    "check",  # the original against the rewritten
    "arguments",  # the command line's arguments
    "commands",  # what each command does
    "cli",  # the command line
)

# What a model may use: JAX and what is built on it for writing and training models.
ECOSYSTEM = {"jax", "flax", "optax", "numpy"}


def modules(folder: str) -> list[pathlib.Path]:
    return sorted((CHECKOUT / folder).rglob("*.py"))


@functools.cache
def imports(path: pathlib.Path) -> list[tuple[str, int]]:
    """The dotted names that a file imports, at any depth, and the lines: `from a import b` is `a.b`."""
    package = path.relative_to(CHECKOUT).parent.parts
    prefix = package if package[:1] == ("xform",) else ("xform", *package)
    found: list[tuple[str, int]] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found.append((alias.name, node.lineno))
        elif isinstance(node, ast.ImportFrom):
            above = prefix[: len(prefix) - node.level + 1] if node.level else ()
            base = ".".join((*above, *((node.module,) if node.module else ())))
            for alias in node.names:
                found.append((f"{base}.{alias.name}", node.lineno))
    return found


def within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def offenders(folder: str, allowed: str, *packages: str) -> list[str]:
    """The imports of xform in a folder that are from none of these packages."""
    return [
        f"{path.relative_to(CHECKOUT)}:{line} imports {name}; {allowed}"
        for path in modules(folder)
        for name, line in imports(path)
        if within(name, "xform", "passes", "kernels", "models", "tests") and not within(name, *packages)
    ]


def layer(path: pathlib.Path) -> str:
    return path.relative_to(CHECKOUT / "xform").parts[0].removesuffix(".py")


def test_every_module_of_xform_has_its_layer() -> None:
    found = {layer(path) for path in modules("xform")} - {"__init__", "__main__", "demo"}
    assert found <= set(LAYERS), f"give {sorted(found - set(LAYERS))} a row in LAYERS"
    assert len(LAYERS) == len(set(LAYERS))


@pytest.mark.parametrize("name", LAYERS)
def test_a_module_of_xform_imports_only_from_layers_below_it(name: str) -> None:
    below = {f"xform.{each}" for each in LAYERS[: LAYERS.index(name) + 1]}
    for path in modules("xform"):
        if layer(path) == name:
            for imported, line in imports(path):
                where = f"{path.relative_to(CHECKOUT)}:{line}"
                if within(imported, "xform"):
                    parts = imported.split(".")
                    module = parts[1] if len(parts) > 1 else "__init__"
                    assert f"xform.{module}" in below, f"{where} imports {imported}, which lies above it"
                assert not within(imported, "passes", "kernels", "models", "tests"), (
                    f"{where} imports {imported}"
                )


def test_models_import_the_jax_ecosystem_alone() -> None:
    standard = sys.stdlib_module_names
    for path in modules("models"):
        for name, line in imports(path):
            own = within(name, "xform.models")
            allowed = name.split(".")[0] in ECOSYSTEM | standard
            assert own or allowed, f"{path.relative_to(CHECKOUT)}:{line} imports {name}: a model is plain JAX"


def test_kernels_import_jax_and_operations_alone() -> None:
    allowed = ("xform.ops", "xform.raising", "xform.errors", "xform.trace", "xform.kernels")
    assert not offenders("kernels", "kernels take xform.ops, raising, errors and trace alone", *allowed)


def test_passes_never_import_passes_nor_what_lies_above_them() -> None:
    above = ("api", "targets", "check", "cli")
    below = [
        f"xform.{name}" for name in (*LAYERS, "layers", "pattern", "ops", "kernels") if name not in above
    ]
    assert not offenders("passes", "passes take the library below `api`, never each other", *below)


def test_passes_and_models_are_named_by_string_in_the_library() -> None:
    for path in modules("xform"):
        if path == CHECKOUT / "xform" / "__init__.py":
            continue  # the names a user writes
        for name, line in imports(path):
            named = within(name, "xform.passes", "xform.models", "xform.kernels")
            assert not named, f"{path.relative_to(CHECKOUT)}:{line} imports {name}: name it by string"


def test_private_names_of_jax_are_imported_in_trace_alone() -> None:
    found = [
        f"{path.relative_to(CHECKOUT)}:{line}: {name}"
        for folder in ("xform", "passes", "kernels", "models")
        for path in modules(folder)
        for name, line in imports(path)
        if within(name, "jax._src") and path != CHECKOUT / "xform" / "trace.py"
    ]
    assert not found, "take these from xform.trace: " + "; ".join(found)


def test_every_private_name_of_jax_that_trace_uses_exists() -> None:
    tree = ast.parse((CHECKOUT / "xform" / "trace.py").read_text(encoding="utf-8"))
    private = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and within(node.module or "", "jax._src"):
            module = importlib.import_module(str(node.module))
            for alias in node.names:
                submodule = not hasattr(module, alias.name)
                found = importlib.import_module(f"{node.module}.{alias.name}") if submodule else None
                private[alias.asname or alias.name] = found or getattr(module, alias.name)
        assert not (isinstance(node, ast.Import) and any(within(a.name, "jax._src") for a in node.names)), (
            "use from"
        )
    assert private
    used = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)]
    for node in used:
        if node.value.id in private and isinstance(private[node.value.id], types.ModuleType):  # type: ignore[attr-defined]
            name = ast.unparse(node)
            assert hasattr(private[name.split(".")[0]], node.attr), (
                f"xform/trace.py:{node.lineno}: {name} has moved"
            )


def test_every_pass_has_a_test_file_of_its_name() -> None:
    for path in (CHECKOUT / "passes").glob("[!_]*.py"):
        assert (CHECKOUT / "tests" / f"test_{path.name}").is_file(), f"no tests/test_{path.name}"


@pytest.mark.slow
def test_importing_any_module_registers_nothing() -> None:
    """Slow: imports every module in a fresh process, and again under its name at a checkout's root."""
    names = [
        ".".join(path.relative_to(CHECKOUT).with_suffix("").parts).removesuffix(".__init__")
        for folder in ("xform", "passes", "kernels", "models")
        for path in modules(folder)
        if path.name != "__main__.py"
    ]
    names += [f"xform.{name}" for name in names if not within(name, "xform")]
    program = f"""
import importlib
from xform import registry
before = dict(registry.BUILTIN)
for name in {names!r}:
    importlib.import_module(name)
assert registry.BUILTIN == before, registry.BUILTIN
"""
    env = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    run = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
