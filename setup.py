"""Packaging: `xform/` is the library; `passes`, `kernels` and `models` beside it install as subpackages."""

from setuptools import find_packages, setup

FOLDERS = {"xform": "xform", "xform.passes": "passes", "xform.kernels": "kernels", "xform.models": "models"}
PACKAGES = [
    name
    for package, folder in FOLDERS.items()
    for name in (package, *(f"{package}.{inner}" for inner in find_packages(folder)))
]

AOT = ["libtpu>=0.0.52"]
TOKAMAX = ["tokamax>=0.0.17,<0.1"]
MODELS = ["optax>=0.2.5"]
TEST = [
    *AOT,
    *MODELS,
    "hypothesis>=6.100",
    "mypy>=1.15",
    "pytest>=8",
    "pytest-xdist>=3.6",
    "qwix>=0.1.8",
    "ruff>=0.9",
    "transformers==4.55.4",  # the last line with Flax classes: the public models of the tests
]

setup(
    name="xform",
    version="0.1.0",
    description="Rewrites JAX programs: parallelism, memory, precision and kernels as passes over a jaxpr.",
    python_requires=">=3.12",
    packages=PACKAGES,
    package_dir=FOLDERS,
    package_data={"xform": ["py.typed"]},
    install_requires=[
        "absl-py>=2.1",
        "flax>=0.12,<0.13",
        "jax>=0.12,<0.13",
        "jaxlib>=0.12,<0.13",
        "networkx>=3.4",
        "numpy>=2.0",
    ],
    extras_require={"aot": AOT, "models": MODELS, "test": TEST, "tokamax": TOKAMAX},
    entry_points={"console_scripts": ["xform = xform.cli:main"]},
)
