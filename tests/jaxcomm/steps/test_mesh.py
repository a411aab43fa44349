import os
import subprocess
import sys

import jax
import pytest
from jax.sharding import AxisType

import jaxcomm as jc


def test_order_and_type_of_axes():
    mesh = jc.make_mesh(data=2, model=3)
    assert dict(mesh.shape) == {"data": 2, "model": 3}
    assert mesh.axis_types == (AxisType.Auto, AxisType.Auto)
    assert set(mesh.devices.flat) == set(jax.devices()[:6])


def test_no_axes():
    with pytest.raises(ValueError, match=r"at least one axis; got none. make_mesh\(data=4\)"):
        jc.make_mesh()


@pytest.mark.parametrize("size", [0, -1, 2.0, None, True])
def test_a_size_below_one(size):
    with pytest.raises(ValueError, match=f"at least 1 device; got data={size!r}. Pass a positive integer"):
        jc.make_mesh(data=size)


def test_too_few_devices():
    with pytest.raises(ValueError, match=r"got 8 for \(data=3, model=4\), which has 12. .*'jax_num_cpu_devices', 12\)"):
        jc.make_mesh(data=3, model=4)


THREADS = """
import os, jax
jax.config.update("jax_num_cpu_devices", {devices})
import jaxcomm as jc
jc.make_mesh(data={devices})
print(os.environ.get("PJRT_NPROC"))
"""


@pytest.mark.slow
@pytest.mark.skipif(jax.__version_info__ >= (0, 12), reason="JAX starts enough threads by itself")
def test_threads_for_devices():
    environment = {name: value for name, value in os.environ.items() if name not in ("PJRT_NPROC", "XLA_FLAGS")}
    for devices, expected in ((os.cpu_count() + 1, str(max(16, os.cpu_count() + 1))), (1, "None")):
        code = THREADS.format(devices=devices)
        process = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
        )
        assert process.stdout.split() == [expected]
