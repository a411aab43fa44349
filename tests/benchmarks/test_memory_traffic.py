"""Bytes that programs move in memory, counted by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.memory_traffic import read_memory_traffic

FUSIONS = """
%sliced (x: f32[1024]) -> f32[64] {
  %x = f32[1024]{0} parameter(0)
  %flat = f32[1024]{0} bitcast(%x)
  %part = f32[64]{0} slice(%flat), slice={[64:128]}
  ROOT %twice = f32[64]{0} add(%part, %part)
}

%nested (x.2: f32[1024]) -> f32[64] {
  %x.2 = f32[1024]{0} parameter(0)
  %most = f32[1000]{0} slice(%x.2), slice={[0:1000]}
  %half = f32[1000]{0} multiply(%most, %most)
  ROOT %few = f32[64]{0} slice(%half), slice={[64:128]}
}

%both (y: f32[1024], z: f32[1024]) -> f32[1024] {
  %y = f32[1024]{0} parameter(0)
  %z = f32[1024]{0} parameter(1)
  %part.2 = f32[64]{0} slice(%y), slice={[0:64]}
  %all = f32[1024]{0} negate(%y)
  ROOT %sum = f32[1024]{0} add(%all, %z)
}

%updated (t: f32[1024], u: f32[64], at: s32[]) -> f32[1024] {
  %t = f32[1024]{0} parameter(0)
  %u = f32[64]{0} parameter(1)
  %at = s32[] parameter(2)
  %minus = f32[64]{0} negate(%u)
  ROOT %new = f32[1024]{0} dynamic-update-slice(%t, %minus, %at)
}

%body (s: (s32[], f32[64])) -> (s32[], f32[64]) {
  %s = (s32[], f32[64]{0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %v = f32[64]{0} get-tuple-element(%s), index=1
  %w = f32[64]{0} negate(%v)
  ROOT %t.2 = (s32[], f32[64]{0}) tuple(%i, %w)
}

%usual (a: f32[64]) -> f32[64] {
  %a = f32[64]{0} parameter(0)
  ROOT %same = f32[64]{0} copy(%a)
}

%rare (b: f32[64]) -> f32[64] {
  %b = f32[64]{0} parameter(0)
  %b.2 = f32[64]{0} copy(%b)
  ROOT %b.3 = f32[64]{0} copy(%b.2)
}
"""


@pytest.mark.parametrize(
    ("instruction", "expected"),
    [
        ("f32[64]{0} fusion(%p), kind=kLoop, calls=%sliced", 256 + 256),
        ("f32[64]{0} fusion(%p), kind=kLoop, calls=%nested", 256 + 256),
        ("f32[1024]{0} fusion(%p, %q), kind=kLoop, calls=%both", 3 * 4096),
        ("f32[1024]{0} fusion(%p, %r, %n), kind=kLoop, calls=%updated", 256 + 4 + 256),
        ("f32[64]{0} slice(%p), slice={[0:64]}", 512),
        ("f32[8]{0} gather(%p, %k), offset_dims={}", 32 + 32 + 32),
        ("f32[1024]{0} scatter(%p, %k, %m), to_apply=%sum", 32 + 3 * 32),
        ("f32[1024]{0} dynamic-update-slice(%p, %r, %n)", 256 + 4 + 256),
        ("f32[1088]{0} concatenate(%p, %r), dimensions={0}", 2 * 4352),
        ("f32[1024]{0} bitcast(%p)", 0),
        ("f32[1024]{0} all-reduce(%p), replica_groups={{0,1}}, to_apply=%sum", 8192),
        # Asynchronous on GPUs: the start reads, and the end writes.
        ("((f32[64]{0}), f32[256]{0}) all-gather-start(%r), replica_groups={{0,1,2,3}}, dimensions={0}", 256),
        ("f32[256]{0} all-gather-done(%r)", 1024),
        (
            '(s32[], f32[64]{0}) while(%z), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"3"}}',
            1536,
        ),
        ("(s32[], f32[64]{0}) while(%z), condition=%c, body=%body", 512),
        ("f32[64]{0} conditional(%n, %r, %r), branch_computations={%rare, %usual}", 512),
        ("f32[64]{0} call(%r), to_apply=%rare", 1024),
    ],
)
def test_instructions(instruction, expected):
    text = f"""HloModule jit_step
{FUSIONS}
ENTRY %main (p: f32[1024], q: f32[1024], r: f32[64]) -> f32[1024] {{
  %p = f32[1024]{{0}} parameter(0)
  %q = f32[1024]{{0}} parameter(1)
  %r = f32[64]{{0}} parameter(2)
  %n = s32[] parameter(3)
  %k = s32[8]{{0}} parameter(4)
  %m = f32[8]{{0}} parameter(5)
  %z = (s32[], f32[64]{{0}}) parameter(6)
  ROOT %out = {instruction}
}}
"""
    assert read_memory_traffic(text) == expected


def test_a_scope():
    """What is named and not in the scope does not count; what has no name does."""
    text = """HloModule jit_step

ENTRY %main (p: f32[1024]) -> f32[1024] {
  %p = f32[1024]{0} parameter(0)
  %a = f32[1024]{0} negate(%p), metadata={op_name="jit(step)/loss/neg"}
  %b = f32[1024]{0} add(%p, %a), metadata={op_name="jit(step)/jaxcomm/add"}
  ROOT %c = f32[1024]{0} copy(%b)
}
"""
    assert (read_memory_traffic(text), read_memory_traffic(text, "jaxcomm")) == (7 * 4096, 5 * 4096)


def test_programs():
    """One loop that reads two arrays and writes one."""
    n = 1 << 14
    one = jax.ShapeDtypeStruct((n,), np.float32)
    compiled = jax.jit(lambda x, y: jnp.abs(x) + 2 * y).lower(one, one).compile()
    assert read_memory_traffic(compiled.as_text()) == 3 * 4 * n
