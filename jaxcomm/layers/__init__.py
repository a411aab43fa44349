"""Layers that communicate between workers."""

from jaxcomm.layers.boundary import Boundary, dct_mp, masked_boundary
from jaxcomm.layers.late_lookup import late_lookup, late_lookup_traffic
from jaxcomm.layers.late_multiply import late_multiply
from jaxcomm.layers.quantized_gather import quantized_gather
from jaxcomm.layers.sharded_lookup import sharded_lookup
from jaxcomm.layers.split_dense import features_to_rows, narrowing_spec, rows_to_features, split_dense

__all__ = [
    "Boundary",
    "dct_mp",
    "features_to_rows",
    "late_lookup",
    "late_lookup_traffic",
    "late_multiply",
    "masked_boundary",
    "narrowing_spec",
    "quantized_gather",
    "rows_to_features",
    "sharded_lookup",
    "split_dense",
]
