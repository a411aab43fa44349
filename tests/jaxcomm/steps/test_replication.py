"""Outputs of a program that may differ between workers, found by walking over its equations."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxcomm as jc
from jaxcomm.steps.replication import varying_axes

K = 4


def test_what_differs_is_followed_through_loops_and_branches():
    names = []

    def program(own, same):
        late = lax.scan(lambda c, x: ((c[0] + c[1], c[1] + own), x), (same, same), jnp.ones(3))[0]
        left = lax.while_loop(lambda c: c[0] < own, lambda c: (c[0] + 1, 2 * c[1]), (same, same))
        outputs = {
            "same": jnp.sin(same),
            "sum": lax.psum(own, "data"),
            "gathered": lax.all_gather(own, "data"),
            "moved": lax.ppermute(same, "data", [(0, 1)]),
            "index": lax.axis_index("data"),
            "by an own branch": lax.cond(own > 0, lambda: same, lambda: 2 * same),
            "in a branch": lax.cond(same > 0, lambda: own, lambda: same),
            "carried": late[0],
            "times": left[1],
            "jitted": jax.jit(lambda a, b: (a, b))(own, same)[1],
            "rematerialized": jax.checkpoint(lambda a: a * 2)(own),
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
    found = varying_axes(eqn.params["jaxpr"], [frozenset(["data"]), frozenset()])
    replicated = {name for name, axes in zip(sorted(names), found, strict=True) if not axes}
    assert replicated == {"same", "sum", "gathered", "jitted"}
