import os
import subprocess
import sys

import jax
import pytest
from jax.sharding import AxisType

import jaxcomm as jc
from tests.refusals import refusals, refused


def test_order_and_type_of_axes():
    mesh = jc.make_mesh(data=2, model=3)
    assert dict(mesh.shape) == {"data": 2, "model": 3}
    assert mesh.axis_types == (AxisType.Auto, AxisType.Auto)
    assert set(mesh.devices.flat) == set(jax.devices()[:6])


@refusals(
    (jc.make_mesh, "at least one axis", "got none", "make_mesh(data=4)"),
    *((lambda n=n: jc.make_mesh(data=n), "at least 1 device", f"got data={n!r}.") for n in (0, -1, 2.0, None, True)),
    (lambda: jc.make_mesh(data=3, model=4), "got 8 for (data=3, model=4), which has 12", "'jax_num_cpu_devices', 12)"),
)
def test_refusals(call, said):
    refused(call, *said)


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
