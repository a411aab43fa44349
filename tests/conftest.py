"""Eight simulated CPU devices, the same examples in every run, and programs that are compiled once."""

import atexit
import gc
import itertools
import os
import re
import shutil
import tempfile
from importlib.metadata import version
from pathlib import Path

# Set before JAX starts. jax before 0.12 sizes its thread pool by this, and collectives among more simulated devices
# than threads wait for each other for ever.
os.environ["PJRT_NPROC"] = "16"
os.environ["JAX_PLATFORMS"] = "cpu"

# A test's program runs for milliseconds and compiles for a second, three quarters of it in LLVM's passes and XLA's
# fusion emitters. In one part it takes the least work, and the other cores have tests of their own. If XLA_FLAGS is
# set, even to nothing, the tests run the programs that users run: `.ci/run` does so with a few tests on the newest
# Python. XLA after JAX 0.10 refuses to start with a flag that it does not know, such as the emitters'.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    + (
        " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
        if version("jaxlib").startswith("0.10.")
        else ""
    ),
)

# The tests spend their time on compiling. The processes of pytest-xdist, and those that tests start, inherit this
# folder from the first one, so that each program is compiled by only one of them. A run that is given a folder finds
# there what the runs before it have compiled.
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="jaxcomm-tests-")
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)

import hypothesis
import jax
import pytest

from jaxcomm.steps import reductions

jax.config.update("jax_num_cpu_devices", 8)

MOST_MAPS = 40_000  # of a process of tests
FINISHED = itertools.count(1)

gc.disable()  # tracing makes so many objects that looking for garbage among them takes a seventh of the time

# A function compiles in a second and runs in milliseconds, so a deadline would only measure compiling.
hypothesis.settings.register_profile("few", deadline=None, max_examples=8)
hypothesis.settings.register_profile("ci", parent=hypothesis.settings.get_profile("few"), derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "few")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With pytest-xdist, gives all tests of a case of `tests/jaxcomm/cases.py` to one process, which compiles once."""
    from xdist.scheduler import LoadScopeScheduling

    class ByCase(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            case = re.search(r"\[.*?(\w+\(.*?\))", nodeid)
            return case[1] if case else nodeid

    return ByCase(config, log)


@pytest.fixture(autouse=True)
def room_for_programs():
    """After every 20th test, collects garbage, and frees programs before Linux refuses more memory maps.

    Each program has dozens of maps. The limit, vm.max_map_count, is 65,530, and a process that reaches it crashes. A
    program that is needed again is read from the cache.
    """
    yield
    if next(FINISHED) % 20:
        return
    gc.collect()
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MOST_MAPS:
        jax.clear_caches()


@pytest.fixture(autouse=True)
def no_error_in_a_comparison(monkeypatch):
    """An internal error of the comparison of two traces, which users see as a warning, fails the test."""
    monkeypatch.setattr(reductions, "_TOLERATED", reductions._DifferentError)
