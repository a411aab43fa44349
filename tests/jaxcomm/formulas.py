"""The documented bytes that a worker receives in a step, by hand.

A ring all-reduce of m bytes costs 2 (K-1)/K * m, an all-gather (K-1) * m, and an all-to-all of parts of m bytes too.
"""

import math
from fractions import Fraction
from typing import Any

from tests.jaxcomm import cases
from tests.jaxcomm.cases import Case

HEADER_WORDS = 3  # of a gathered payload: sound or overfull, sent, overflow
REGION_HEADER_WORDS = 3  # sound or overfull, sent, overflow
REGION_SLACK = Fraction(5, 4)
BITS = {"float32": 32, "bfloat16": 16}


def words(numbers: int, bits: int) -> int:
    return math.ceil(numbers * bits / 32)


def all_reduce(K: int, numbers: int) -> Fraction:
    return Fraction(2 * (K - 1), K) * 4 * numbers


class Sizes:
    """What bytes depend on.

    Attributes:
      K: workers.
      total: elements of all tensors.
      inside: elements of every compressed tensor.
      n: elements of the flat vector, in whole blocks.
      slots: of every compressed tensor in a payload.
    """

    def __init__(self, case: Case, tree: str, K: int):
        sizes = {name: s.size for name, s in cases.shapes_of(tree).items()}
        self.K = K
        self.total = sum(sizes.values())
        self.inside = [sizes[name] for name in cases.compressed(case, tree)]
        self.n = sum(math.ceil(size / 1024) * 1024 for size in self.inside)
        self.slots = [capacity(case, size) for size in self.inside]

    @property
    def dense(self) -> Fraction:
        """Bytes of the tensors that are not compressed."""
        return all_reduce(self.K, self.total - sum(self.inside))

    @property
    def everything(self) -> Fraction:
        """Bytes of a dense exchange."""
        return all_reduce(self.K, self.total)


def received_bytes(case: Case, tree: str, K: int) -> tuple[Fraction, Fraction]:
    """(in a usual step, at most)."""
    s = Sizes(case, tree, K)
    if not s.inside:
        return s.everything, s.everything
    if case.method == "random_k":
        usual = s.dense + compact_sum(case, s)
        return usual, usual
    if case.method == "iwp":
        return iwp(case, s)
    if case.method in ("sign", "quant_dp", "terngrad"):
        usual = s.dense + coded_sum(case, s)
        return usual, usual
    usual = s.dense + payloads(case, s)
    if case.drain_every:
        return usual, max(usual, s.everything)
    return usual, max(usual, warm_up(case, s))


def capacity(case: Case, n: int) -> int:
    """Slots of a tensor of n elements; the options are decimal numbers, and so is the arithmetic."""
    if case.method in ("sign", "quant_dp", "terngrad"):
        return n
    if case.method == "iwp":
        return max(1, math.ceil(Fraction(str(case.option("density"))) * n))
    sparsity = Fraction(str(case.option("sparsity")))
    if case.method == "dct_dp":
        selected = n - math.floor(n * sparsity) + 1  # the threshold is the floor(n * sparsity)-th smallest
        return min(n, math.ceil(Fraction(str(case.option("slack"))) * selected))
    return max(1, n - math.floor(n * sparsity))


def warm_up(case: Case, s: Sizes) -> Fraction:
    """A dense exchange, with a flag, and a count for the metrics."""
    if not case.momentum or not case.option("warmup_steps"):
        return Fraction(0)
    return all_reduce(s.K, s.total + 1) + all_reduce(s.K, 1)


def payloads(case: Case, s: Sizes) -> Fraction:
    """Of topk, dct_dp and dgc."""
    gathered, balanced = gathered_bytes(case, s), balanced_bytes(case, s)
    if case.option("collective") == "auto":
        few = gathered <= all_reduce(s.K, s.n) / 4
        return gathered if few else min(gathered, balanced)
    return {"gather": gathered, "balanced": balanced}[case.option("collective")]


def gathered_bytes(case: Case, s: Sizes) -> Fraction:
    """(K-1) payloads."""
    slots = sum(s.slots)
    values = words(slots, BITS[case.option("value_dtype")])
    return Fraction(4 * (s.K - 1) * (HEADER_WORDS + values + index_words(case.option("index_codec"), s.n, slots)))


def balanced_bytes(case: Case, s: Sizes) -> Fraction:
    """A payload to the owner of every region, and one from it, with 5/4 of a region's share of the slots."""
    region = math.ceil(s.n / (s.K * 1024)) * 1024
    slots = min(region, math.ceil(REGION_SLACK * sum(s.slots) / s.K))
    values = words(slots, BITS[case.option("value_dtype")])
    payload = REGION_HEADER_WORDS + values + index_words(case.option("index_codec"), region, slots)
    return Fraction(2 * 4 * (s.K - 1) * payload)


def compact_sum(case: Case, s: Sizes) -> Fraction:
    """Values at shared coordinates, and a flag in every message."""
    slots, bits = sum(s.slots), BITS[case.option("value_dtype")]
    collective = case.option("collective")
    if collective == "psum" or (collective == "auto" and bits == 32):
        return all_reduce(s.K, slots + 1)
    part = math.ceil(slots / (s.K * 32)) * 32  # slots
    # Two shots: all-to-all, then all-gather. Ring: K-1 hops, then all-gather.
    return Fraction(2 * 4 * (s.K - 1) * (words(part, bits) + 1))


def iwp(case: Case, s: Sizes) -> tuple[Fraction, Fraction]:
    """A mask in every step, or every `life_span` steps, and its values."""
    codec = case.option("mask_codec")
    mask = {"bitmap": bitmaps(s), "coded": positions(case, s)}
    mask["auto"] = min(mask.values())
    rarest = max(mask[codec], mask["bitmap"]) if case.option("warmup_steps") else mask[codec]
    values = s.dense + compact_sum(case, s)
    usual = values + (mask[codec] if case.option("life_span") == 1 else 0)
    return usual, rarest + max(values, warm_up(case, s))


def bitmaps(s: Sizes) -> Fraction:
    """To the owners of parts of a word or more, and back."""
    return Fraction(2 * 4 * (s.K - 1) * math.ceil(s.n / 32 / s.K))


def positions(case: Case, s: Sizes) -> Fraction:
    """A row a publisher in an all-reduce, or a row a worker in an all-gather; with counts of slots, and overflow."""
    slots = sum(s.slots)
    coded = min(index_words(codec, s.n, slots) for codec in ("plain", "elias_fano"))
    row, r = coded + len(s.slots) + 1, case.option("publishers")
    return min(all_reduce(s.K, r * row), Fraction((s.K - 1) * 4 * row))


def coded_sum(case: Case, s: Sizes) -> Fraction:
    """Of sign, quant_dp and terngrad, whose scalers are in an all-reduce of their own."""
    part = math.ceil(s.n / (s.K * 1024)) * 1024
    first, second = code_words(case, part, 1), code_words(case, part, s.K)
    gathered = Fraction(4 * (s.K - 1) * (code_words(case, s.n, 1) + 1))
    two_shot = Fraction(4 * (s.K - 1) * (first + second + 2))
    total = {"gather": gathered, "two_shot": two_shot, "auto": min(gathered, two_shot)}[case.option("collective")]
    return total + (all_reduce(s.K, len(s.inside)) if case.method == "terngrad" else 0)


def code_words(case: Case, n: int, of_workers: int) -> int:
    """Words of n numbers, or of the sum of those of some workers."""
    if case.method == "sign":
        return words(n, 1) + n // 1024
    if case.method == "quant_dp":
        return words(n, case.option("bits")) + n // case.option("bucket")
    return words(n, math.ceil(math.log2(2 * of_workers + 1)))


def index_words(codec: Any, n: int, slots: int) -> int:
    """Words of the indices of `slots` of n coordinates."""
    if codec == "plain":
        return slots
    if codec == "bitmap":
        return n // 32
    if codec == "elias_fano":  # the upper parts as a bitmap, the lower l bits as planes, the best l
        return min(math.ceil((((n - 1) >> low) + slots) / 32) + low * math.ceil(slots / 32) for low in range(31))
    if codec == "rice":
        return rice(n, slots)
    assert codec == "auto"
    return min(index_words(each, n, slots) for each in ("plain", "bitmap", "elias_fano", "rice"))


def rice(n: int, slots: int) -> int:
    """At 1.09 times the entropy if evenly spread positions then have four standard deviations of room, else for all."""
    p = slots / n
    entropy = -math.log2(p) - (1 - p) / p * math.log2(1 - p) if p < 1 else 0.0

    def quotient(low: int) -> float:  # the expected gap >> low; the gaps are 1, 2, ..., (1 - p)^(gap - 1) p of them
        return sum((1 - p) ** (j * 2**low - 1) for j in range(1, 4000) if j * 2**low < 80 / p)

    low = min(range(15), key=lambda low: low + quotient(low))
    upper = max(slots, math.floor((1.09 * entropy - low) * slots))
    most = slots + ((n - 1) >> low)
    tight = math.ceil(min(upper, most) / 32)
    survival = (1 - p) ** 2**low
    need = slots * (1 + quotient(low)) + 4 * math.sqrt(slots * survival) / (1 - survival)
    return (tight if need <= 32 * tight else math.ceil(most / 32)) + low * math.ceil(slots / 32)
