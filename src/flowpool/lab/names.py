"""Names of what the lab has, for choices and completion on the command line, where nothing heavy is imported.

Tests hold them to what they name.
"""

from __future__ import annotations

from typing import Literal

Backbone = Literal["sgc", "gin", "blind", "linear"]
Propagation = Literal["normalised", "raw"]
Size = Literal["none", "append", "scale"]
Norm = Literal["none", "nodes", "output", "both"]
Protocol = Literal["paper", "errica"]

DATASETS = (
    "MUTAG",
    "PTC_MR",
    "PROTEINS",
    "ENZYMES",
    "NCI1",
    "DD",
    "IMDB-BINARY",
    "Mutagenicity",
    "SHAPES",
)  # fmt: skip

FIGURES = ("measure", "flow", "conditioning", "hessian", "coupling", "vanishing", "circle", "invariance", "mutag")

POOLS = (
    "flow",
    "flow-attention",
    "flow-deviations",
    "flow-free",
    "flow-kmeans",
    "flow-mahalanobis",
    "flow-step",
    "flow2",
    "mean",
    "sum",
    "max",
    "sort",
    "topk",
    "sag",
    "diff",
    "mincut",
    "struct",
    "haar",
    "gmt",
    "set-transformer",
    "sinkformer",
    "otke",
    "pswe",
    "wegl",
    "tw",
    "tfgw",
)
