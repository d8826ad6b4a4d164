"""The frozen protocol: nobody trains a network; embeddings and kernels are compared by a kernel machine.

Node features are averaged over neighbours (`flowpool.sklearn.Propagate`), a method turns each graph into a vector or
compares graphs directly, and everything that can be chosen is chosen by cross-validation inside the training graphs,
from the same grid for every method.
"""
