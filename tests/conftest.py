"""Eight simulated CPU devices for every test, set before JAX starts."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "standard")  # optax needs it; strict: test_precision.py
# LLVM makes loops fast that run for microseconds here, and takes a third of each compilation. The HLO programs, which
# the audits read, are the same without. Commands in processes of their own, but for those of test_processes.py,
# compile as users' do.
jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture(scope="class")
def compiled_as_for_users():
    """For what is compared to the last bits, which are a matter of the compiler's settings."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture(autouse=True, scope="session")
def _eight_devices():
    assert jax.device_count() == 8, f"the tests need 8 simulated devices and JAX started {jax.device_count()}"


@pytest.fixture
def float64():
    """Run a test in float64, the judge of every sharded result."""
    with jax.enable_x64(True):
        yield


