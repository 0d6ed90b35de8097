"""What every test runs under: eight virtual CPU devices, no network, and the `slow` marker.

The environment is set when this file is imported, before any test can import jax; the workers of pytest-xdist
import it too.
"""

import gc
import os

import pytest

DEVICES = "--xla_force_host_platform_device_count"

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
_FLAGS = f"{DEVICES}=8 --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
if DEVICES not in os.environ.get("XLA_FLAGS", ""):
    # Programs here are small and run once: compiling them is what takes time.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAGS}".strip()

# What is imported stays: the garbage collector would find nothing in it.
gc.set_threshold(1_000_000)

import hypothesis  # noqa: E402  (after the environment: its plugins may import numpy and jax)

# The same examples in every run, and no deadline: the first example of a test pays for jax's tracing.
hypothesis.settings.register_profile("xform", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("xform")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes over two seconds; the test says why")


def pytest_collection_finish() -> None:
    """What was imported stays: the garbage collector need not go over it again and again, nor over what tests
    make as often as it does by default.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
