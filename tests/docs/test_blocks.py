"""The Python of README.md and of the pages whose cells are not executed with the site: every block runs as it is.

A block may use what a reader has: a model, its loss, rows, a mesh. `READER` defines that. `OWN` has what else a block
needs, before and after it, by a part of its text.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

READER = """
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np, optax
from jax.sharding import NamedSharding, PartitionSpec as P
import jaxcomm as jc

def normal(*shape):
    return jnp.asarray(np.random.default_rng(sum(shape)).standard_normal(shape), jnp.float32)

workers, mesh = 4, jc.make_mesh(data=4)
params, batch = {"up": normal(16, 32), "down": normal(32, 8)}, {"x": normal(16, 16), "y": normal(16, 8)}

def loss_fn(params, batch):
    return jnp.mean((jax.nn.relu(batch["x"] @ params["up"]) @ params["down"] - batch["y"]) ** 2)

tx = jc.chain(jc.dct_dp(0.99), optax.adamw(3e-4))
"""

STAGES = """
params = [{"w": normal(8, 8)}, {"w": normal(8, 8)}, {"w": normal(8, 8)}]
batch = {"x": normal(16, 8), "y": normal(16, 8)}
bottom_params, middle_params, top_params = params

def loss(logits, batch):
    return jnp.mean((logits - batch["y"]) ** 2)

def bottom(params, x, batch):
    return jax.nn.relu(batch["x"] @ params["w"])

def middle(params, x, batch):
    return jax.nn.relu(x @ params["w"])

top, stages = middle, [bottom, middle, middle]

def loss_fn(logits, batch):
    return loss(logits, batch), {}
"""

LATE = """
params = {"mlp": {"dense_1": {"kernel": normal(512, 512), "bias": normal(512)}}}
batch = {"x": normal(256, 512), "y": normal(256, 512)}
"""

TABLE = """
params = {"table": normal(64, 8), "mlp": normal(8, 1)}
batch = {"categories": jnp.arange(32, dtype=jnp.int32).reshape(16, 2), "y": normal(16, 1)}
"""

LEARNS = """
first = None
for _ in range(3):
    state, metrics = step(state, batch)
    first = metrics["loss"] if first is None else first
assert int(metrics["skipped"]) == 0 and metrics["loss"] < first
"""

INIT = "state = step.init(params)\n"

# A part of a block's text: (what runs before the block, what runs after it).
OWN = {
    "jc.planner.estimate(params, workers=16": ("", ""),
    "def token_loss(": (
        "",
        """
each = jnp.mean((jax.nn.relu(batch["x"] @ params["up"]) @ params["down"] - batch["y"]) ** 2, 1)
np.testing.assert_allclose(metrics["loss"], each[:11].mean(), rtol=1e-5)
""",
    ),
    "jc.powersgd(rank=4)": ("workers = 8", LEARNS),
    "jc.data_parallel(train_step, mesh)": (
        """
def train_step(state, batch):
    params, opt_state = state
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), {"loss": loss, "skipped": 0}
""",
        "state = params, tx.init(params)" + LEARNS,
    ),
    "their gradients must be already reduced": ("plan = jc.planner.plan_late_multiply({'up': (16, 32)}, 16, 4)", ""),
    "opt_state = jax.jit(jax.shard_map(tx.init": ("", "jc.state.check_rows(opt_state, 4)"),
    "params = [bottom_params": (STAGES, LEARNS),
    "def move(x)": (
        "",
        """
sent = jax.jit(jax.shard_map(move, mesh=jc.make_mesh(stage=2), in_specs=P(), out_specs=P("stage")))(normal(4, 20))
assert int((sent != 0).sum()) == 4 * 2
""",
    ),
    'plan.mode("mlp/dense_1")': (LATE, LEARNS),
    '"convolutions": P()': (
        """
params = {"convolutions": normal(16, 32), "kernel": normal(32, 8), "bias": normal(8)}

def loss_fn(params, batch):
    features = jax.nn.relu(batch["x"] @ params["convolutions"])
    return jnp.mean((jc.layers.split_dense(features, params["kernel"], params["bias"]) - batch["y"]) ** 2)
""",
        INIT + LEARNS,
    ),
    "jc.layers.late_lookup": (TABLE, LEARNS),
    "jc.layers.quantized_gather": (
        "optimizer = optax.sgd(0.01)",
        """
rows, everyone = P("data"), P()
specs = rows, everyone, rows, everyone, rows
run = jax.jit(jax.shard_map(worker_step, mesh=mesh, in_specs=specs, out_specs=specs[:4]))
residual = jax.tree.map(lambda w: jnp.zeros((4 * w.shape[0], *w.shape[1:])), params)  # a copy's shape on each worker
first, state = loss_fn(params, batch), (params, params, residual, optimizer.init(params))
for _ in range(3):
    state = run(*state, batch)
assert loss_fn(state[1], batch) < first
""",
    ),
    "lookups = {": (
        TABLE
        + """
def loss_fn(params, batch):
    return jnp.mean((params["table"].mean(axis=1) @ params["mlp"] - batch["y"]) ** 2)
""",
        INIT + LEARNS,
    ),
    'auto=("model",))': ("", INIT + LEARNS),
    'auto=("fsdp",))': ("", LEARNS + "assert model['up'].sharding.spec == P('fsdp')"),
    'jax.make_mesh((4, 2), ("data", "model"))': ("", INIT + LEARNS),
    "jc.hierarchical": ("", LEARNS),
    "delay=1)": ("", LEARNS + "assert step.verify(state, batch).overlap > 0.9"),
    "# measures; every process calls it": ("", ""),
    "plan.write(": (
        "gradient = jax.grad(loss_fn)(params, batch)",
        'assert jc.placement.read_plan(Path("plan.json")).step == plan.step',
    ),
    "jc.placement.read_plan": (
        "jc.placement.make_plan(jc.planner.estimate(params, 4, 1e8), params).write(Path('plan.json'))",
        LEARNS,
    ),
    '"fc/0" in plan.computed': (
        """
params = {"fc": [{"kernel": normal(16, 16), "bias": normal(16)}, {"kernel": normal(16, 8), "bias": normal(8)}]}

def loss_fn(params, batch):
    x = jax.nn.relu(batch["x"] @ params["fc"][0]["kernel"] + params["fc"][0]["bias"])
    return jnp.mean((x @ params["fc"][1]["kernel"] + params["fc"][1]["bias"] - batch["y"]) ** 2)
""",
        "assert first_layer(params, batch['x']).shape == (16, 16)",
    ),
}


def blocks():
    fences = []
    for name in ("README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md"))):
        text = (ROOT / name).read_text()
        for match in re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            line = text[: match.start()].count("\n") + 2
            marks = [pytest.mark.slow] if "jc.advise" in match[1] else []
            fences.append(pytest.param(name, line, match[1], id=f"{name}:{line}", marks=marks))
    return fences


@pytest.mark.parametrize(("name", "line", "block"), blocks())
def test_a_block_runs(name, line, block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ((before, after),) = [replacement for part, replacement in OWN.items() if part in block]
    namespace = {}
    exec(READER + before, namespace)
    exec(compile("\n" * (line - 1) + block, str(ROOT / name), "exec"), namespace)  # an error names the page's line
    exec(after, namespace)


def test_a_part_is_in_one_block():
    texts = [param.values[2] for param in blocks()]
    assert {part: sum(part in text for text in texts) for part in OWN} == dict.fromkeys(OWN, 1)
