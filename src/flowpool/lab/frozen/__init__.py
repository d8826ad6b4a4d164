"""The frozen protocol: nobody trains a network; embeddings and kernels are compared by a support vector machine.

Node features are averaged over neighbours (`flowpool.sklearn.Propagate`), a method turns each graph into a vector or
compares graphs directly, and everything that can be chosen is chosen by cross-validation inside the training graphs,
from the same grid for every method.
"""

from flowpool.lab.frozen.methods import METHODS
from flowpool.lab.frozen.protocol import Frozen, FrozenResult, FrozenStore, chosen_methods, evaluate, make_tasks
from flowpool.lab.frozen.selection import Grid
from flowpool.lab.frozen.summary import FrozenRow, compare, conclude

__all__ = [
    "METHODS",
    "Frozen",
    "FrozenResult",
    "FrozenRow",
    "FrozenStore",
    "Grid",
    "chosen_methods",
    "compare",
    "conclude",
    "evaluate",
    "make_tasks",
]
