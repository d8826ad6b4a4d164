"""The bench: datasets, splits, backbones, pools, training, evaluation and reports."""
