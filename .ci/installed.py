"""Whether an installed jaxcomm is whole, where its own dependencies are all that is there; see `.ci/package`."""

import importlib
import importlib.metadata
import importlib.util
import pkgutil
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxcomm as jc

EXTRAS = ("flax", "orbax", "tensorflow_datasets", "grain", "sklearn", "tyro", "rich", "matplotlib", "tensorboardX")

for name in EXTRAS:
    assert importlib.util.find_spec(name) is None, f"{name} is of an extra, and must not be here"
for module in pkgutil.walk_packages(jc.__path__, "jaxcomm."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)

files = importlib.metadata.files("jaxcomm") or []
assert {path.parts[0] for path in files if ".dist-info" not in path.parts[0]} == {"jaxcomm"}, "the library alone"
places = {str(path) for path in files}
assert {"jaxcomm/py.typed", "jaxcomm/planner/costs.json"} <= places, "what is not Python"
assert any(path.endswith("licenses/LICENSE") for path in places), "the licence"
metadata = importlib.metadata.metadata("jaxcomm")
assert not re.search(r"\]\((?!https://|#)", metadata.get_payload()), "links of the description that an index can follow"
assert "+" not in metadata["Version"], "a version that an index refuses"

params, batch = {"w": jnp.zeros((64, 32))}, np.ones((8, 64), np.float32)
step = jc.simulate(
    lambda params, rows: jnp.mean((rows @ params["w"] - 1) ** 2),
    jc.chain(jc.dct_dp(0.9, life_span=1), optax.sgd(0.1)),
    workers=4,
)
state, losses = step.init(params), []
for _ in range(30):
    state, metrics = step(state, batch)
    losses.append(float(metrics["loss"]))
assert losses[-1] < 0.5 * losses[0], losses
print(f"jaxcomm {importlib.metadata.version('jaxcomm')}, JAX {jax.__version__}: {len(places)} files, trained")
