"""Sets of vectors and graphs for scikit-learn: fixed-size vectors, distances and kernels, without training a network.

A set is an array ``(N, D)`` of N vectors, N as it comes. Lists of such arrays go into estimators where scikit-learn
usually takes one table, so that pipelines, cross-validation and grid search work as ever.
"""

try:
    import sklearn  # noqa: F401
except ImportError as error:
    raise ImportError("flowpool.sklearn needs scikit-learn: pip install 'flowpool[sklearn]'.") from error

from flowpool.sklearn.distances import WassersteinKernel, wasserstein_distances
from flowpool.sklearn.propagate import Propagate
from flowpool.sklearn.vectorizer import FlowVectorizer

__all__ = ["FlowVectorizer", "Propagate", "WassersteinKernel", "wasserstein_distances"]
