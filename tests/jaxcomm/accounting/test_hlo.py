"""Collectives in literal HLO text, in every notation that XLA prints."""

from fractions import Fraction

import pytest

from jaxcomm.accounting.hlo import read_program
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


def test_empty_groups_are_all_devices_replicas_included():
    line = "%all-reduce.1 = f32[64]{0} all-reduce(%p), replica_groups={}, to_apply=%sum"
    assert only(module(line, partitions=2, replicas=3)).workers == 6


@pytest.mark.parametrize("groups", ["mesh['data'=4] {'data':(1)2}", "mesh['data'=4] {'model'}", "something[4]"])
def test_unknown_groups_are_refused(groups):
    line = f"%all-reduce.1 = f32[64]{{0}} all-reduce(%p), channel_id=1, replica_groups={groups}, to_apply=%sum"
    with pytest.raises(ValueError, match=r"in a known notation, got: %all-reduce.1 = "):
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


@pytest.mark.parametrize(
    ("start", "done", "expected"),
    [
        (
            f"%s = f32[64]{{0}} all-reduce-start(%p), {GROUPS}, to_apply=%sum",
            "%d = f32[64]{0} all-reduce-done(%s)",
            Traffic("all_reduce", 256, 4),
        ),
        (
            f"%s = (f32[64]{{0}}, f32[256]{{0}}) all-gather-start(%p), {GROUPS}, dimensions={{0}}",
            "%d = f32[256]{0} all-gather-done(%s)",
            Traffic("all_gather", 256, 4),
        ),
        (
            f"%s = ((f32[64]{{0}}, u8[2]{{0}}), (f32[256]{{0}}, u8[8]{{0}})) all-gather-start(%p, %q), {GROUPS}",
            "%d = (f32[256]{0}, u8[8]{0}) all-gather-done(%s)",
            Traffic("all_gather", 258, 4),
        ),
        (
            "%s = (f32[64]{0}, f32[64]{0}, u32[], u32[]) collective-permute-start(%p), source_target_pairs={{0,1}}",
            "%d = f32[64]{0} collective-permute-done(%s)",
            Traffic("permute", 256, 4),
        ),
        # XLA's sugar for an async-start around an operation: ((operands), results, contexts).
        (
            f"%s = ((f32[64]{{0}}), f32[64]{{0}}) all-to-all-start(%p), {GROUPS}, dimensions={{0}}",
            "%d = f32[64]{0} all-to-all-done(%s)",
            Traffic("all_to_all", 256, 4),
        ),
        (
            f"%s = ((f32[64]{{0}}), f32[16]{{0}}) reduce-scatter-start(%p), {GROUPS}, dimensions={{0}}, to_apply=%sum",
            "%d = f32[16]{0} reduce-scatter-done(%s)",
            Traffic("reduce_scatter", 256, 4),
        ),
        (
            f"%s = ((f32[64]{{0}}, f32[8]{{0}}), (f32[16]{{0}}, f32[2]{{0}})) reduce-scatter-start(%p, %q), {GROUPS}",
            "%d = (f32[16]{0}, f32[2]{0}) reduce-scatter-done(%s)",
            Traffic("reduce_scatter", 288, 4),
        ),
    ],
)
def test_asynchronous_pairs_count_once(start, done, expected):
    assert only(module(start, done)) == expected


def test_an_async_start_counts_the_computation_it_wraps_once():
    wrapped = (
        "\n%wrapped (q: f32[64]) -> f32[64] {\n  %q = f32[64]{0} parameter(0)\n"
        f"  ROOT %r = f32[64]{{0}} all-to-all(%q), {GROUPS}\n}}\n"
    )
    start = "%s = ((f32[64]{0}), f32[64]{0}) async-start(%p), calls=%wrapped"
    update = "%u = ((f32[64]{0}), f32[64]{0}) async-update(%s), calls=%wrapped"
    done = "%d = f32[64]{0} async-done(%s), calls=%wrapped"
    assert only(module(start, done, before=wrapped)) == Traffic("all_to_all", 256, 4)
    assert only(module(start, update, done, before=wrapped)) == Traffic("all_to_all", 256, 4)


@pytest.mark.parametrize(
    ("listed", "pairs"),
    [
        ("{{0,1}}", ((0, 1),)),
        ("{{3,0},{10,11}}", ((3, 0), (10, 11))),
        ("{{1,1},{0,2}}", ((1, 1), (0, 2))),
    ],
)
@pytest.mark.parametrize("start", [False, True])
def test_a_permutation_names_who_sends_to_whom(listed, pairs, start):
    rest = f'channel_id=3, source_target_pairs={listed}, metadata={{op_name="jit(step)/ppermute"}}'
    line = f"%s = f32[64]{{0}} collective-permute(%p), {rest}"
    if start:
        line = f"%s = (f32[64]{{0}}, f32[64]{{0}}, u32[], u32[]) collective-permute-start(%p), {rest}"
    traffic = only(module(line, partitions=12))
    assert (traffic.pairs, traffic.workers) == (pairs, 12)
    moved = sum(source != target for source, target in pairs)
    assert traffic.received == Fraction(256 * moved, 12)
    assert read_program(module(line)).links() == dict.fromkeys(pairs, 256)


def test_no_other_collective_names_pairs():
    assert only(module(f"%r = f32[64]{{0}} all-to-all(%p), {GROUPS}, dimensions={{0}}")).pairs is None


def test_links_count_loops_calls_and_the_usual_branch():
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


def test_a_loop_counts_as_often_as_it_runs():
    trips = ', backend_config={"known_trip_count":{"n":"7"},"known_init_step":{"init":"0","step":"1"}}'
    assert only(module(LOOP + trips, before=BODY)) == Traffic("all_reduce", 256, 4, times=7)


def test_a_loop_of_unknown_length_is_refused_if_it_communicates():
    with pytest.raises(ValueError, match=r"known body and length, got: %w = .*use lax.scan with a static length"):
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
    "called",
    ["branch_computations={%usual.2, %rare}", "true_computation=%rare, false_computation=%usual.2"],
)
def test_a_conditional_has_a_usual_and_a_dearest_branch(called):
    line = f"%c = f32[64]{{0}} conditional(%pred, %p, %p), {called}"
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
def test_called_computations_count_every_time_they_are_called(line):
    program = read_program(module(line, line.replace("%c =", "%d ="), before=BRANCHES))
    assert program.always == [Traffic("all_reduce", 256, 4)] * 2


@pytest.mark.parametrize("op", ["ragged-all-to-all", "collective-broadcast", "send", "recv", "ragged-all-to-all-start"])
def test_collectives_that_cannot_be_counted_are_refused(op):
    with pytest.raises(ValueError, match=rf"Bytes of '{op}' cannot be counted here, got: %r = "):
        read_program(module(f"%r = f32[64]{{0}} {op}(%p), {GROUPS}"))


def test_a_type_of_unknown_size_is_refused():
    with pytest.raises(ValueError, match="bytes of type 'opaque'"):
        read_program(module(f"%r = opaque[] all-reduce(%p), {GROUPS}"))


def test_text_without_an_entry_is_refused():
    with pytest.raises(ValueError, match=r"has an ENTRY computation, got none: pass compiled.as_text\(\)"):
        read_program("HloModule nothing\n")


def test_names_of_operations_in_metadata_and_of_instructions_do_not_count():
    line = '%all-reduce.7 = f32[64]{0} add(%p, %all-gather.3), metadata={op_name="all-reduce(x)"}'
    assert not read_program(module(line)).communicates
