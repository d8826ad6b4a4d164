"""The layers for PyTorch Geometric."""
