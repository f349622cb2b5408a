"""Entries of the catalogue that stand for their kind where one pass is tested in depth.

tests/ops/test_catalogue.py takes every entry through all passes.
"""

from __future__ import annotations

IN_DEPTH = (
    "comba",
    "delta_rule",
    "dplr",
    "gated_delta_rule",
    "gdn2",
    "gla",
    "hgrn2",
    "iplr",
    "kda",
    "linear_attention",
    "retnet",
    "rwkv6",
    "sigmoid_gla",
    "simple_gla",
)
