"""Which coordinates travel. Selectors look at one worker's vector and never communicate."""

from jaxcomm.selectors.selection import Selected, Selection, compact, compact_rows, draw_start, select_threshold
from jaxcomm.selectors.topk import select_topk, select_with_ties

__all__ = [
    "Selected",
    "Selection",
    "compact",
    "compact_rows",
    "draw_start",
    "select_threshold",
    "select_topk",
    "select_with_ties",
]
