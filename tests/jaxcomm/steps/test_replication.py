"""Outputs of a program that may differ between workers, found by walking over its equations."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxcomm as jc
from jaxcomm.steps.replication import varying_axes

K = 4


def test_loops_and_branches():
    names = []

    def program(local, shared):
        late = lax.scan(lambda c, x: ((c[0] + c[1], c[1] + local), x), (shared, shared), jnp.ones(3))[0]
        left = lax.while_loop(lambda c: c[0] < local, lambda c: (c[0] + 1, 2 * c[1]), (shared, shared))
        outputs = {
            "same": jnp.sin(shared),
            "sum": lax.psum(local, "data"),
            "gathered": lax.all_gather(local, "data"),
            "moved": lax.ppermute(shared, "data", [(0, 1)]),
            "index": lax.axis_index("data"),
            "by an own branch": lax.cond(local > 0, lambda: shared, lambda: 2 * shared),
            "in a branch": lax.cond(shared > 0, lambda: local, lambda: shared),
            "carried": late[0],
            "times": left[1],
            "jitted": jax.jit(lambda a, b: (a, b))(local, shared)[1],
            "rematerialized": jax.checkpoint(lambda a: a * 2)(local),
        }
        names.extend(outputs)
        return outputs

    (eqn,) = jax.make_jaxpr(
        jax.shard_map(
            lambda a, b: program(a[0], b),
            mesh=jc.make_mesh(data=K),
            in_specs=(P("data"), P()),
            out_specs=P(),
            check_vma=False,
        )
    )(jnp.ones(K), jnp.ones(())).jaxpr.eqns
    axes = varying_axes(eqn.params["jaxpr"], [frozenset(["data"]), frozenset()])
    replicated = {name for name, axes in zip(sorted(names), axes, strict=True) if not axes}
    assert replicated == {"same", "sum", "gathered", "jitted"}
