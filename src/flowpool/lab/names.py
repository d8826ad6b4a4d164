"""Names of what the lab has, for choices and completion on the command line, where nothing heavy is imported.

Tests hold them to what they name.
"""

from __future__ import annotations

from typing import Literal

Backbone = Literal["sgc", "gin", "gine", "blind", "linear", "sets"]
Propagation = Literal["normalised", "raw"]
Size = Literal["none", "append", "scale"]
Norm = Literal["none", "nodes", "output", "both"]
TrainedProtocol = Literal["paper", "errica"]
Protocol = Literal["paper", "errica", "frozen"]
Padding = Literal["none", "empty", "mass"]
Preset = Literal["plain", "strong", "molecules"]
Metric = Literal["accuracy", "auc", "rmse", "mae", "r2"]
Reference = Literal["normal", "kmeans"]
Gradient = Literal["implicit", "unrolled"]
UpdateStep = Literal["gradient", "momentum", "adam"]

DATASETS = (
    "MUTAG",
    "PTC_MR",
    "PROTEINS",
    "ENZYMES",
    "NCI1",
    "DD",
    "IMDB-BINARY",
    "Mutagenicity",
    "ESOL",
    "Lipophilicity",
    "BACE",
    "ORBIT5K",
    "DIGITS",
    "MUSK1",
    "MUSK2",
    "ELEPHANT",
    "COREL-DOGS",
    "BIRDS",
    "TRX",
    "UCSB",
    "SHAPES",
)  # fmt: skip

FIGURES = (
    "measure", "flow", "conditioning", "hessian", "coupling", "vanishing", "circle", "invariance", "mutag", "sinkformer",
)  # fmt: skip

# Where each pool stands in flowpool.lab.pools.
POOLS = {
    "flow": "flow.FlowPool",
    "flow-attention": "flow_attention.FlowAttentionPool",
    "flow-deviations": "flow_deviations.FlowDeviationsPool",
    "flow-free": "flow_free.FlowFreePool",
    "flow-kmeans": "flow_kmeans.FlowKMeansPool",
    "flow-mahalanobis": "flow_mahalanobis.FlowMahalanobisPool",
    "flow-step": "flow_step.FlowStepPool",
    "flow2": "flow_hierarchy.FlowHierarchyPool",
    "mean": "reduce.MeanPool",
    "sum": "reduce.SumPool",
    "max": "reduce.MaxPool",
    "sum+mean+max": "reduce.SumMeanMaxPool",
    "mean-deviations": "reduce.MeanDeviationsPool",
    "vpa": "reduce.VPAPool",
    "pna": "pna.PNAPool",
    "attention": "attention.AttentionPool",
    "set2set": "set2set.Set2SetPool",
    "equilibrium": "equilibrium.EquilibriumPool",
    "flow-readout": "flow_readout.FlowReadoutPool",
    "sort": "sort.SortPool",
    "topk": "topk.TopKPool",
    "sag": "sag.SAGPool",
    "diff": "diff.DiffPool",
    "mincut": "mincut.MinCutPool",
    "struct": "struct.StructPool",
    "haar": "haar.HaarPool",
    "gmt": "gmt.GMTPool",
    "set-transformer": "set_transformer.SetTransformerPool",
    "sinkformer": "sinkformer.SinkformerPool",
    "otke": "otke.OTKEPool",
    "slices": "slices.SlicesPool",
    "slices-general": "slices.GeneralisedSlicesPool",
    "fsw": "fsw.FSWPool",
    "wegl": "wegl.WEGLPool",
    "tw": "tw.TWPool",
    "ot-gnn": "ot_gnn.OTGNNPool",
    "tfgw": "tfgw.TFGWPool",
}
