"""What a GPU program launches, counted by hand in short dumps as XLA writes them."""

import re

import pytest

from benchmarks.launches import Launches, read_dump, read_launches

# Seven turns of a loop, a loop of unknown length, a scatter, an all-reduce beside a kernel, and a conditional.
SEQUENCE = """\
001: kCopy         [source       | next=003 (2)] kCopy
004: kWhile        [prev=003 (1) | next=010 (1)]
condition:
    005: kCustomKernel [source | sink] loop_compare_fusion grid: [1, 1, 1] threads: [1, 1, 1]  shared_memory: 0 bytes
  body:
    006: kCustomKernel [source       | next=007 (1)] loop_reduce_fusion grid: [40, 1, 1] threads: [128, 1, 1]
    009: kCustomKernel [source       | sink        ] loop_add_fusion_2 grid: [1, 1, 1] threads: [1, 1, 1]
010: kWhile        [prev=004 (1) | next=015 (1)]
condition:
    011: kCustomKernel [source | sink] wrapped_compare grid: [1, 1, 1] threads: [1, 1, 1]  shared_memory: 0 bytes
  body:
    012: kCustomKernel [source       | next=013 (1)] loop_add_fusion grid: [40, 1, 1] threads: [128, 1, 1]
    013: kCopy         [prev=012 (1) | sink        ] kCopy
016: kCustomKernel [prev=015 (1) | next=017 (1)] input_scatter_fusion grid: [40, 1, 1] threads: [128, 1, 1]
017: kAsyncStart   [prev=016 (1) | next=024 (3)] stream=communication_stream[0], async_id=17
    018: kAllReduce [source | sink] kAllReduce
019: kCustomKernel [prev=010 (4) | next=024 (2)] loop_compare_fusion_1 grid: [1, 1, 1] threads: [1, 1, 1]
020: kAsyncDone    [source       | sink        ] async_id=17
024: kConditional  [prev=019 (2) | sink        ]
  false_branch:
    021: kCustomKernel [source       | next=022 (1)] loop_reduce_fusion grid: [8, 1, 1] threads: [128, 1, 1]
    022: kCustomKernel [prev=021 (1) | sink        ] loop_reverse_fusion grid: [8, 1, 1] threads: [128, 1, 1]
  true_branch:
    023: kCopy [source | sink] kCopy
"""
# A graph with a conditional in it, of which one branch is empty; and a loop whose body is a graph.
GRAPHS = """\
000: kCommandBuffer [source       | next=007 (1)]
    001: kCustomKernel [source       | next=003 (2)] input_scatter_fusion grid: [1, 1, 1] threads: [8, 1, 1]
    003: kConditional  [prev=001 (1) | next=009 (1)]
      false_branch:
        No thunks.      true_branch:
        005: kCustomKernel [source       | sink        ] loop_add_fusion grid: [1, 1, 1] threads: [8, 1, 1]
    006: kCopy         [source       | sink        ] kCopy
004: kWhile         [prev=000 (1) | next=000 (1)]
condition:
    007: kCustomKernel [source | sink] loop_compare_fusion grid: [1, 1, 1] threads: [1, 1, 1]  shared_memory: 0 bytes
  body:
    000: kCommandBuffer [source | sink]
        008: kCustomKernel [source       | sink        ] input_scatter_fusion grid: [1, 1, 1] threads: [8, 1, 1]
009: kAllGather     [prev=000 (1) | sink        ] kAllGather
"""
# A loop in a loop, as XLA indents it.
NESTED = """\
004: kWhile         [prev=000 (1) | next=000 (1)]
condition:
    007: kCustomKernel [source | sink] loop_compare_fusion grid: [1, 1, 1] threads: [1, 1, 1]  shared_memory: 0 bytes
  body:
    010: kWhile         [prev=000 (1) | next=000 (1)]
condition:
        011: kCustomKernel [source | sink] loop_compare_fusion grid: [1, 1, 1] threads: [1, 1, 1]
      body:
        012: kCustomKernel [source       | sink        ] loop_add_fusion grid: [1, 1, 1] threads: [8, 1, 1]
    013: kCopy         [source       | sink        ] kCopy
014: kCopy         [source       | sink        ] kCopy
"""
NAMES = """
thunk_metadata {
  thunk_info {
    profile_annotation: "while.18"
    thunk_id: 4
  }
  thunk_kind: "kWhile"
}
thunk_metadata {
  thunk_info {
    profile_annotation: "while.19"
    thunk_id: 10
  }
  thunk_kind: "kWhile"
}
"""
TEXT = """HloModule jit_f, is_scheduled=true

ENTRY %main.1 (p: f32[64]) -> f32[64] {
  %while.18 = (s32[], f32[64]{0}) while(%t), condition=%c, body=%b, backend_config={"known_trip_count":{"n":"7"}}
  %while.19 = (s32[], f32[64]{0}, s32[]) while(%tuple.33), condition=%region_4, body=%region_3
}
"""
PTX = """
.visible .entry loop_add_fusion(
	.param .u64 .ptr .align 128 loop_add_fusion_param_0
)
{
	atom.shared.add.u32 	%r1, [%r2], 1;
	ld.shared.b32 	%r3, [%r4];
}
.visible .entry input_scatter_fusion(
	.param .u64 .ptr .align 128 input_scatter_fusion_param_0
)
{
	atom.relaxed.sys.global.add.f32 	%r9, [%rd4], %r8;
}
"""


def test_loops_conditionals_and_collectives():
    """1 copy; 7 turns of 2; 1 turn of 2 after its condition; a scatter, an all-reduce, a kernel; the shorter branch."""
    expected = Launches(total=1 + 7 * 2 + (1 + 2) + 1 + 1 + 1 + 1, host_waits=2, atomics=1)
    assert read_launches(TEXT, SEQUENCE, NAMES, PTX) == expected


def test_graphs():
    """The host does not wait for a conditional in a graph. The loop launches its graph seven times."""
    expected = Launches(total=1 + 0 + 1 + 7 + 1, in_graphs=2 + 7, graphs=1 + 7, atomics=1 + 7)
    assert read_launches(TEXT, GRAPHS, NAMES, PTX) == expected


def test_a_loop_in_a_loop():
    """The host waits in each of the seven turns of the outer loop; the inner has one turn after its condition."""
    expected = Launches(total=7 * (1 + 1 + 1) + 1, host_waits=7)
    assert read_launches(TEXT, NESTED, NAMES, PTX) == expected


@pytest.mark.parametrize("name", ["atom.relaxed.sys.global.cas.b32", "atom.global.cas.b32"])
def test_compare_and_swap(name):
    launches = read_launches(TEXT, SEQUENCE, NAMES, PTX.replace("atom.relaxed.sys.global.add.f32", name))
    assert (launches.atomics, launches.swap_loops) == (1, 1)


def test_a_folder(tmp_path):
    with pytest.raises(ValueError, match="must dump the thunks of a GPU program; got none"):
        read_dump(tmp_path, TEXT)
    stem = "module_0001.jit_f"
    for name, content in (
        ("thunk_sequence.txt", SEQUENCE),
        ("thunk_metadata.txt", NAMES),
        ("1.ptx", PTX),
        ("3.ptx", re.sub("input_scatter", "loop_reverse", PTX)),
    ):
        (tmp_path / f"{stem}.{name}").write_text(content)
    assert read_dump(tmp_path, TEXT) == read_launches(TEXT, SEQUENCE, NAMES, PTX)
    (tmp_path / f"{stem}.thunk_sequence_after_thunk_passes.txt").write_text(GRAPHS)
    assert read_dump(tmp_path, TEXT).graphs == 8


def test_a_sequence_without_thunks():
    with pytest.raises(ValueError, match="must have at least one; got ''"):
        read_launches(TEXT, "", NAMES, PTX)
