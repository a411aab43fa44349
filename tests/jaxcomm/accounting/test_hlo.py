"""Collectives in literal HLO text, in every notation that XLA prints."""

import re
from dataclasses import dataclass
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest

from jaxcomm.accounting.hlo import read_overlap, read_program
from jaxcomm.traffic import Traffic

SUM = """
%sum (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %add = f32[] add(%x, %y)
}
"""


def module(*instructions, before="", partitions=4, replicas=None):
    counts = f", num_partitions={partitions}" + (f", replica_count={replicas}" if replicas else "")
    body = "\n".join(f"  {line}" for line in instructions)
    return (
        f"HloModule jit_step, is_scheduled=true{counts}\n{SUM}{before}\n"
        f"ENTRY %main.1 (p: f32[64]) -> f32[64] {{\n  %p = f32[64]{{0}} parameter(0)\n{body}\n"
        "  ROOT %copy.9 = f32[64]{0} copy(%p)\n}\n"
    )


def only(text):
    program = read_program(text)
    assert not program.conditionals
    (traffic,) = program.always
    return traffic


GROUPS = "channel_id=1, replica_groups={{0,1,2,3}}, use_global_device_ids=true"


@pytest.mark.parametrize(
    ("groups", "workers"),
    [
        ("{{0,1},{2,3}}", 2),
        ("{{0,1,2,3}}", 4),
        ("{{0},{1},{2},{3}}", 1),
        ("[2,2]<=[4]", 2),
        ("[1,4]<=[4]", 4),
        ("[4,2]<=[2,4]T(1,0)", 2),
        ("mesh['data'=4] {'data'}", 4),
        ("mesh['data'=2,'model'=3] {'data'}", 2),
        ("mesh['axis_0'=1,'axis_1'=3,'axis_2'=2], device_ids=([2,3]T(1,0)) {'axis_1'}", 3),
        ("mesh['data'=2,'model'=3] {'model','data'}", 6),
        ("{}", 4),
    ],
)
def test_groups(groups, workers):
    line = (
        f"%all-reduce.1 = f32[64]{{0}} all-reduce(%p), channel_id=1, replica_groups={groups}, "
        'use_global_device_ids=true, to_apply=%sum, metadata={op_name="jit(step)/psum"}'
    )
    assert only(module(line)) == Traffic("all_reduce", 256, workers)


def test_empty_groups_are_all_devices():
    line = "%all-reduce.1 = f32[64]{0} all-reduce(%p), replica_groups={}, to_apply=%sum"
    assert only(module(line, partitions=2, replicas=3)).workers == 6


@pytest.mark.parametrize("groups", ["mesh['data'=4] {'data':(1)2}", "mesh['data'=4] {'model'}", "something[4]"])
def test_unknown_groups(groups):
    line = f"%all-reduce.1 = f32[64]{{0}} all-reduce(%p), channel_id=1, replica_groups={groups}, to_apply=%sum"
    with pytest.raises(ValueError, match=r"in a known notation; got: %all-reduce.1 = "):
        read_program(module(line))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (f"%r = f32[64]{{0}} all-reduce(%p), {GROUPS}, to_apply=%sum", Traffic("all_reduce", 256, 4)),
        (
            f"%r = (f32[64]{{0}}, bf16[3,5]{{1,0}}, f32[]) all-reduce(%p, %q, %s), {GROUPS}, to_apply=%sum",
            Traffic("all_reduce", 256 + 30 + 4, 4),
        ),
        (f"%r = u32[4,64]{{1,0}} all-gather(%p), {GROUPS}, dimensions={{0}}", Traffic("all_gather", 256, 4)),
        (
            f"%r = (u32[4,64]{{1,0}}, u8[8]{{0}}) all-gather(%p, %q), {GROUPS}, dimensions={{0}}",
            Traffic("all_gather", 258, 4),
        ),
        (
            f"%r = f32[16]{{0}} reduce-scatter(%p), {GROUPS}, dimensions={{0}}, to_apply=%sum",
            Traffic("reduce_scatter", 256, 4),
        ),
        (f"%r = f32[64]{{0}} all-to-all(%p), {GROUPS}, dimensions={{0}}", Traffic("all_to_all", 256, 4)),
        (
            f"%r = (f32[16]{{0}}, f32[16]{{0}}, /*index=2*/f32[16]{{0}}) all-to-all(%a, %b, %c), {GROUPS}",
            Traffic("all_to_all", 192, 4),
        ),
        (
            "%r = f32[64]{0} collective-permute(%p), channel_id=1, source_target_pairs={{0,1},{1,2},{2,3},{3,0}}",
            Traffic("permute", 256, 4),
        ),
        (f"ROOT %r = pred[64]{{0:T(256)}} all-reduce(%p), {GROUPS}, to_apply=%sum", Traffic("all_reduce", 64, 4)),
        (f"%r = f8e4m3fn[64]{{0}} all-gather(%p), {GROUPS}", Traffic("all_gather", 16, 4)),
    ],
)
def test_operations(line, expected):
    assert only(module(line)) == expected


# As XLA of JAX 0.10.2 and of 0.12 wrote them for four H100, started early enough to overlap with products.
OLD, NEW = "replica_groups={{0,1,2,3}}, use_global_device_ids=true", "replica_groups=mesh['data'=4] {'data'}"
ALIAS = ", use_global_device_ids=true, to_apply=%sum, output_to_operand_aliasing={{1}: (0, {})}"
RING = "source_target_pairs={{0,1},{1,2},{2,3},{3,0}}"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (f"f32[64]{{0}} all-reduce-start(%p), channel_id=1, {OLD}, to_apply=%sum", ("all_reduce", 256)),
        (f"((f32[64]{{0}}), f32[64]{{0}}) all-reduce-start(%p), channel_id=1, {NEW}{ALIAS}", ("all_reduce", 256)),
        (f"bf16[64]{{0}} all-reduce-start(%p), channel_id=1, {OLD}, to_apply=%sum", ("all_reduce", 128)),
        (f"((bf16[64]{{0}}), bf16[64]{{0}}) all-reduce-start(%p), channel_id=1, {NEW}{ALIAS}", ("all_reduce", 128)),
        (f"((s8[64]{{0}}), s8[64]{{0}}) all-reduce-start(%p), channel_id=1, {NEW}{ALIAS}", ("all_reduce", 64)),
        (
            f"((f32[64]{{0}}, s8[8]{{0}}), (f32[64]{{0}}, s8[8]{{0}})) all-reduce-start(%p, %q), {NEW}{ALIAS}",
            ("all_reduce", 264),
        ),
        (
            f"(u32[1,64]{{1,0}}, u32[4,64]{{1,0}}) all-gather-start(%p), channel_id=1, {OLD}, dimensions={{0}}",
            ("all_gather", 256),
        ),
        (
            f"((u32[1,64]{{1,0}}), u32[4,64]{{1,0}}) all-gather-start(%p), channel_id=1, {NEW}, dimensions={{0}}",
            ("all_gather", 256),
        ),
        (
            f"((bf16[1,64]{{1,0}}), bf16[4,64]{{1,0}}) all-gather-start(%p), channel_id=1, {NEW}, dimensions={{0}}",
            ("all_gather", 128),
        ),
        (
            f"((bf16[64]{{0}}), bf16[16]{{0}}) reduce-scatter-start(%p), channel_id=1, {NEW}, dimensions={{0}}",
            ("reduce_scatter", 128),
        ),
        (
            f"((u32[4,16]{{1,0}}), u32[4,16]{{1,0}}) all-to-all-start(%p), channel_id=1, {NEW}, dimensions={{0}}",
            ("all_to_all", 256),
        ),
        (f"(u32[64]{{0}}, u32[64]{{0}}) collective-permute-start(%p), channel_id=1, {RING}", ("permute", 256)),
        (f"((u32[64]{{0}}), u32[64]{{0}}) collective-permute-start(%p), channel_id=1, {RING}", ("permute", 256)),
    ],
)
def test_operations_of_gpus(line, expected):
    traffic = only(module(f"%s = {line}"))
    assert (traffic.op, traffic.operand_bytes, traffic.workers) == (*expected, 4)


@pytest.mark.parametrize(
    ("line", "types"),
    [
        (f"u32[4,64]{{1,0}} all-gather(%p), {GROUPS}, dimensions={{0}}", "u32"),
        (f"((f32[64]{{0}}, s8[8]{{0}}), (f32[64]{{0}}, s8[8]{{0}})) all-reduce-start(%p, %q), {NEW}{ALIAS}", "f32+s8"),
        (f"(bf16[64]{{0}}, bf16[8]{{0}}) all-reduce-start(%p, %q), {OLD}, to_apply=%sum", "bf16"),
    ],
)
def test_types(line, types):
    assert only(module(f"%s = {line}")).dtype == types


PAIRS = "source_target_pairs={{0,1}}"


@pytest.mark.parametrize(
    ("start", "end", "operand"),
    [
        (f"f32[64]{{0}} all-reduce-start(%p), {GROUPS}, to_apply=%sum", "f32[64]{0}", 256),
        (f"(f32[64]{{0}}, f32[256]{{0}}) all-gather-start(%p), {GROUPS}, dimensions={{0}}", "f32[256]{0}", 256),
        (
            f"((f32[64]{{0}}, u8[2]{{0}}), (f32[256]{{0}}, u8[8]{{0}})) all-gather-start(%p, %q), {GROUPS}",
            "(f32[256]{0}, u8[8]{0})",
            258,
        ),
        (f"(f32[64]{{0}}, f32[64]{{0}}, u32[], u32[]) collective-permute-start(%p), {PAIRS}", "f32[64]{0}", 256),
        # XLA's sugar for an async-start around an operation: ((operands), results, contexts).
        (f"((f32[64]{{0}}), f32[64]{{0}}) all-to-all-start(%p), {GROUPS}, dimensions={{0}}", "f32[64]{0}", 256),
        (f"((f32[64]{{0}}), f32[16]{{0}}) reduce-scatter-start(%p), {GROUPS}, to_apply=%sum", "f32[16]{0}", 256),
        (
            f"((f32[64]{{0}}, f32[8]{{0}}), (f32[16]{{0}}, f32[2]{{0}})) reduce-scatter-start(%p, %q), {GROUPS}",
            "(f32[16]{0}, f32[2]{0})",
            288,
        ),
    ],
)
def test_asynchronous_pairs(start, end, operand):
    op = re.search(r" ([\w-]+)-start\(", start)[1]
    name = {"collective-permute": "permute"}.get(op, op.replace("-", "_"))
    assert only(module(f"%s = {start}", f"%d = {end} {op}-done(%s)")) == Traffic(name, operand, 4)


def test_an_async_start_counts_once():
    computation = (
        "\n%wrapped (q: f32[64]) -> f32[64] {\n  %q = f32[64]{0} parameter(0)\n"
        f"  ROOT %r = f32[64]{{0}} all-to-all(%q), {GROUPS}\n}}\n"
    )
    start = "%s = ((f32[64]{0}), f32[64]{0}) async-start(%p), calls=%wrapped"
    update = "%u = ((f32[64]{0}), f32[64]{0}) async-update(%s), calls=%wrapped"
    process = "%d = f32[64]{0} async-done(%s), calls=%wrapped"
    assert only(module(start, process, before=computation)) == Traffic("all_to_all", 256, 4)
    assert only(module(start, update, process, before=computation)) == Traffic("all_to_all", 256, 4)


@pytest.mark.parametrize(
    ("listing", "pairs"),
    [
        ("{{0,1}}", ((0, 1),)),
        ("{{3,0},{10,11}}", ((3, 0), (10, 11))),
        ("{{1,1},{0,2}}", ((1, 1), (0, 2))),
    ],
)
@pytest.mark.parametrize("start", [False, True])
def test_permutations_name_their_pairs(listing, pairs, start):
    attributes = f'channel_id=3, source_target_pairs={listing}, metadata={{op_name="jit(step)/ppermute"}}'
    line = f"%s = f32[64]{{0}} collective-permute(%p), {attributes}"
    if start:
        line = f"%s = (f32[64]{{0}}, f32[64]{{0}}, u32[], u32[]) collective-permute-start(%p), {attributes}"
    traffic = only(module(line, partitions=12))
    assert (traffic.pairs, traffic.workers) == (pairs, 12)
    count = sum(source != target for source, target in pairs)
    assert traffic.received == Fraction(256 * count, 12)
    assert read_program(module(line)).links() == dict.fromkeys(pairs, 256)


def test_other_collectives_have_no_pairs():
    assert only(module(f"%r = f32[64]{{0}} all-to-all(%p), {GROUPS}, dimensions={{0}}")).pairs is None


def test_links():
    permute = "%r = f32[64]{0} collective-permute(%v), source_target_pairs={{0,1}}"
    body = BODY.replace(f"%r = f32[64]{{0}} all-reduce(%v), {GROUPS}, to_apply=%sum", permute)
    rare = BRANCHES.replace(f"all-reduce(%q), {GROUPS}", "collective-permute(%q), source_target_pairs={{1,0}}")
    trips = ', backend_config={"known_trip_count":{"n":"7"}}'
    call = "%c = f32[64]{0} call(%p), to_apply=%rare"
    branches = "%d = f32[64]{0} conditional(%i, %p, %p), branch_computations={%rare, %usual.2}"
    program = read_program(module(LOOP + trips, call, branches, before=body + rare))
    assert program.links() == {(0, 1): 7 * 256, (1, 0): 2 * 256}


BODY = f"""
%body (t: (s32[], f32[64])) -> (s32[], f32[64]) {{
  %t = (s32[], f32[64]{{0}}) parameter(0)
  %v = f32[64]{{0}} get-tuple-element(%t), index=1
  %r = f32[64]{{0}} all-reduce(%v), {GROUPS}, to_apply=%sum
  ROOT %o = (s32[], f32[64]{{0}}) tuple(%i, %r)
}}

%condition (t: (s32[], f32[64])) -> pred[] {{
  %t = (s32[], f32[64]{{0}}) parameter(0)
  ROOT %lt = pred[] compare(%a, %b), direction=LT
}}
"""
LOOP = "%w = (s32[], f32[64]{0}) while(%init), condition=%condition, body=%body"


def test_loops():
    trips = ', backend_config={"known_trip_count":{"n":"7"},"known_init_step":{"init":"0","step":"1"}}'
    assert only(module(LOOP + trips, before=BODY)) == Traffic("all_reduce", 256, 4, times=7)


COUNTED_LOOP = """
%body (s: (s32[], f32[64])) -> (s32[], f32[64]) {{
  %s = (s32[], f32[64]) parameter(0)
  %moved = f32[64]{{0}} collective-permute(%x), channel_id=2, source_target_pairs={{{{0,1}},{{1,0}}}}
}}

%condition (s: (s32[], f32[64])) -> pred[] {{
  %end = s32[]{{:T(128)}} constant(7)
  %c = (s32[], f32[64]) parameter(0)
  %at = s32[]{{:T(128)}} get-tuple-element(%c), index=1
  ROOT %lt = pred[]{{:T(512)}} compare(%at, %end), direction={direction}
}}
"""


@pytest.mark.parametrize("first", [0, 3])
def test_loops_of_tpus(first):
    """A loop without known_trip_count, as the compiler for TPUs prints it."""
    start = (f"%zero = s32[]{{:T(128)}} constant({first})", "%zero.1 = s32[]{:T(128)} copy(%zero)")
    state = "%state = (f32[64]{0}, /*index=1*/s32[]) tuple(%p, /*index=1*/%zero.1)"
    loop = "%w = (f32[64]{0}, /*index=1*/s32[]) while(%state), condition=%condition, body=%body"
    lines = (*start, state, loop)
    assert only(module(*lines, before=COUNTED_LOOP.format(direction="LT"))).times == 7 - first
    for unknown in ((*start[1:], state, loop), (*start, loop)):
        with pytest.raises(ValueError, match="known body and length"):
            read_program(module(*unknown, before=COUNTED_LOOP.format(direction="LT")))
    with pytest.raises(ValueError, match="known body and length"):
        read_program(module(*lines, before=COUNTED_LOOP.format(direction="NE")))


def test_loops_of_unknown_length():
    with pytest.raises(ValueError, match=r"known body and length; got: %w = .*Use lax.scan with a static length"):
        read_program(module(LOOP, before=BODY))
    silent = BODY.replace("all-reduce", "negate")
    assert not read_program(module(LOOP, before=silent)).communicates


BRANCHES = f"""
%rare (q: f32[64]) -> f32[64] {{
  %q = f32[64]{{0}} parameter(0)
  ROOT %r = f32[64]{{0}} all-reduce(%q), {GROUPS}, to_apply=%sum
}}

%usual.2 (q: f32[64]) -> f32[64] {{
  %q = f32[64]{{0}} parameter(0)
  ROOT %g = f32[8]{{0}} all-gather(%q), {GROUPS}, dimensions={{0}}
}}
"""


@pytest.mark.parametrize(
    "keyword",
    ["branch_computations={%usual.2, %rare}", "true_computation=%rare, false_computation=%usual.2"],
)
def test_conditionals(keyword):
    line = f"%c = f32[64]{{0}} conditional(%pred, %p, %p), {keyword}"
    program = read_program(module(line, before=BRANCHES))
    assert not program.always
    assert program.received == 24
    assert program.received_at_most == 384


@pytest.mark.parametrize(
    "line",
    [
        "%c = f32[64]{0} call(%p), to_apply=%rare",
        "%c = f32[64]{0} fusion(%p), kind=kLoop, calls=%rare",
        '%c = f32[64]{0} custom-call(%p), custom_call_target="x", called_computations={%rare}',
    ],
)
def test_calls(line):
    program = read_program(module(line, line.replace("%c =", "%d ="), before=BRANCHES))
    assert program.always == [Traffic("all_reduce", 256, 4)] * 2


@pytest.mark.parametrize("op", ["ragged-all-to-all", "collective-broadcast", "send", "recv", "ragged-all-to-all-start"])
def test_uncountable_collectives(op):
    with pytest.raises(ValueError, match=rf"must be countable: one of .*; got '{op}': %r = "):
        read_program(module(f"%r = f32[64]{{0}} {op}(%p), {GROUPS}"))


def test_a_type_of_unknown_size():
    with pytest.raises(ValueError, match="of known bytes; got 'opaque'"):
        read_program(module(f"%r = opaque[] all-reduce(%p), {GROUPS}"))


def test_text_without_an_entry():
    with pytest.raises(ValueError, match=r"must have an ENTRY computation; got none. Pass compiled.as_text\(\)"):
        read_program("HloModule nothing\n")


def test_names_do_not_count():
    line = '%all-reduce.7 = f32[64]{0} add(%p, %all-gather.3), metadata={op_name="all-reduce(x)"}'
    assert not read_program(module(line)).communicates


def between_slices(kind, payload, received, target='"{1,2}x{0:3}"'):
    """Returns the pair of transfers that XLA's compiler for TPUs prints for a collective between two slices of four."""
    line = (
        'is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",'
        f'_xla_host_transfer_rendezvous="{kind}_0",_xla_megascale_reduce_operation="SUM",'
        f'_xla_megascale_target={target},_xla_megascale_transfer_type="{kind}"}}, backend_config={{"flag_configs":[]}}'
    )
    return (
        f"%send = ({payload}{{0:T(1024)}}, u32[], token[]) send(%p, %after-all), channel_id=2, {line}",
        f"%recv = ({received}{{0:T(1024)}}, u32[], token[]) recv(%after-all), channel_id=1, {line}",
        "%recv-done = (f32[64]{0:T(1024)}, token[]) recv-done(%recv), channel_id=1, is_host_transfer=true",
    )


@pytest.mark.parametrize(
    ("kind", "payload", "received", "expected"),
    [
        ("ALL_GATHER", "u32[1024]", "u32[2048]", Traffic("all_gather", 4096, 2)),
        ("ALL_REDUCE", "f32[4,8,128]", "f32[4,8,128]", Traffic("all_reduce", 16384, 2)),
        ("REDUCE_SCATTER", "f32[4,8,128]", "f32[2,8,128]", Traffic("reduce_scatter", 16384, 2)),
        ("ALL_TO_ALL", "u32[2,1,1024]", "u32[2,1,1024]", Traffic("all_to_all", 8192, 2)),
    ],
)
def test_collectives_between_slices(kind, payload, received, expected):
    assert only(module(*between_slices(kind, payload, received))) == expected


def test_an_unknown_one_between_slices():
    with pytest.raises(ValueError, match=r"must be countable: one of .*; got 'send'"):
        read_program(module(*between_slices("BROADCAST", "f32[1024]", "f32[1024]")))


@pytest.mark.parametrize("target", ['"{1,2,3,4}x{0:3}"', '"{1:4}x{0:3}"'])
def test_lists_and_ranges_of_slices(target):
    assert only(module(*between_slices("ALL_REDUCE", "f32[1024]", "f32[1024]", target))).workers == 4


def test_groups_and_pairs_between_slices():
    """Devices are named by their ids."""
    ids = [100000 + device for device in range(4)] + [200000 + device for device in range(4)]
    group = "{{" + ",".join(map(str, ids)) + "}}"
    lines = between_slices("ALL_TO_ALL", "u32[8,1,1024]", "u32[8,1,1024]", group)
    assert only(module(*lines)) == Traffic("all_to_all", 32768, 8)
    pairs = "{{100000->200000},{200000->100000},{100001->200001},{200001->100001}}"
    traffic = only(module(*between_slices("ONE_TO_ONE", "u32[1024]", "u32[1024]", pairs)))
    assert (traffic.op, traffic.workers, traffic.received) == ("permute", 4, 4096)
    assert traffic.pairs == ((0, 2), (2, 0), (1, 3), (3, 1))


@dataclass(frozen=True)
class Chip:
    id: int
    slice_index: int


def test_axes_between_slices():
    chips = [[Chip(100000 * (part + 1) + chip, part) for chip in range(4)] for part in range(2)]
    mesh = SimpleNamespace(devices=np.array(chips), axis_names=("slice", "data"))
    group = "{{" + ",".join(str(chip.id) for row in chips for chip in row) + "}}"
    pairs = "{{100000->200000},{200000->100000}}"
    for kind, target, axes in (
        ("ALL_REDUCE", '"{1,2}x{0:3}"', ("slice",)),
        ("ALL_TO_ALL", group, ("slice", "data")),
        ("ONE_TO_ONE", pairs, ("slice",)),
    ):
        text = module(*between_slices(kind, "f32[1024]", "f32[1024]", target))
        (traffic,) = read_program(text, mesh).always
        assert traffic.axes == axes


def test_a_reduce_scatter_in_a_fusion():
    fused = (
        "\n%all-reduce-scatter.1 (q: f32[4,8,128]) -> f32[1,8,128] {\n  %q = f32[4,8,128]{2,1,0} parameter(0)\n"
        f"  %all = f32[4,8,128]{{2,1,0:T(8,128)}} all-reduce(%q), {GROUPS}, to_apply=%sum\n"
        "  ROOT %own = f32[1,8,128]{2,1,0} dynamic-slice(%all, %o, %o, %o), dynamic_slice_sizes={1,8,128}\n}\n"
    )
    line = "%f = f32[1,8,128]{2,1,0} fusion(%p), kind=kCustom, calls=%all-reduce-scatter.1"
    assert only(module(line, before=fused)) == Traffic("reduce_scatter", 16384, 4)


def test_a_collective_that_overlaps_counts_once():
    """Its start, the work in between and its end are fusions, each of which contains it."""

    def fused(number, channel):
        groups = GROUPS.replace("channel_id=1", f"channel_id={channel}")
        return (
            f"\n%fused_computation.{number} (q{number}: u32[8]) -> u32[32] {{\n"
            f"  %q{number} = u32[8]{{0}} parameter(0)\n"
            f"  ROOT %all-gather.{number} = u32[32]{{0:T(1024)}} all-gather(%q{number}), {groups}, dimensions={{0}}, "
            f'frontend_attributes={{chain_id="0"}}\n}}\n'
        )

    lines = [f"%f{i} = u32[32]{{0}} fusion(%p), kind=kCustom, calls=%fused_computation.{i}" for i in range(3)]
    assert only(module(*lines, before="".join(fused(i, 2) for i in range(3)))) == Traffic("all_gather", 32, 4)
    two = read_program(module(*lines, before="".join(fused(i, 2 + (i > 1)) for i in range(3)))).always
    assert two == [Traffic("all_gather", 32, 4)] * 2


def test_a_receive_waits_for_its_send():
    """One product feeds the transfer, one does not: half of the products can be computed meanwhile."""
    product = "f32[8,8]{1,0} dot(%p, %p), lhs_contracting_dims={0}, rhs_contracting_dims={0}"
    send, receive, process = between_slices("ALL_REDUCE", "f32[1024]", "f32[1024]")
    lines = (f"%before = {product}", send.replace("send(%p", "send(%before"), receive, process, f"%other = {product}")
    assert read_overlap(module(*lines)) == 0.5


def test_products_in_a_loop():
    """Seven products in the loop, which the collective does not wait for, and one that feeds it."""
    product = "f32[8,8]{1,0} dot(%p, %p), lhs_contracting_dims={0}, rhs_contracting_dims={0}"
    body = COUNTED_LOOP.format(direction="LT")
    count = body.index("  %moved"), body.index("\n}", body.index("  %moved"))
    body = f"{body[: count[0]]}  %p = f32[64]{{0}} parameter(1)\n  %moved = {product}{body[count[1] :]}"
    lines = (
        "%zero = s32[]{:T(128)} constant(0)",
        "%state = (f32[64]{0}, /*index=1*/s32[]) tuple(%p, /*index=1*/%zero)",
        "%w = (f32[64]{0}, /*index=1*/s32[]) while(%state), condition=%condition, body=%body",
        f"%before = {product}",
        f"%r = f32[64]{{0}} all-reduce(%before), {GROUPS}, to_apply=%sum",
    )
    assert read_overlap(module(*lines, before=body)) == 7 / 8
