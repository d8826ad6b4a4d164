"""FlowPool: a set or graph of any size as a fixed number of points that keep its distribution.

Names are imported when they are first asked for, so that ``import flowpool`` itself costs nothing.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flowpool import costs, masses, references
    from flowpool.core.divergence import sinkhorn_divergence
    from flowpool.core.sinkhorn import wasserstein
    from flowpool.nn.coarsen import Coarsened, FlowCoarsen
    from flowpool.nn.pool import FlowPool
    from flowpool.nn.readout import FlowReadout
    from flowpool.nn.register import register_with_pyg
    from flowpool.paper import algorithm_1
    from flowpool.pooling import flow_pool
    from flowpool.results import Pooled
    from flowpool.status import Status
    from flowpool.step.pool import Received, transport_pool

try:
    __version__ = version("flowpool")
except PackageNotFoundError:  # run from a folder that was never installed
    __version__ = "0"

# Where each public name stands; a module stands for itself.
_PLACES = {
    "Coarsened": "nn.coarsen",
    "FlowCoarsen": "nn.coarsen",
    "FlowPool": "nn.pool",
    "FlowReadout": "nn.readout",
    "Pooled": "results",
    "Received": "step.pool",
    "Status": "status",
    "algorithm_1": "paper",
    "costs": "costs",
    "flow_pool": "pooling",
    "masses": "masses",
    "references": "references",
    "register_with_pyg": "nn.register",
    "sinkhorn_divergence": "core.divergence",
    "transport_pool": "step.pool",
    "wasserstein": "core.sinkhorn",
}

__all__ = [
    "Coarsened",
    "FlowCoarsen",
    "FlowPool",
    "FlowReadout",
    "Pooled",
    "Received",
    "Status",
    "algorithm_1",
    "costs",
    "flow_pool",
    "masses",
    "references",
    "register_with_pyg",
    "sinkhorn_divergence",
    "transport_pool",
    "wasserstein",
]
if find_spec("torch_geometric") is None:  # ``from flowpool import *`` takes what can be had
    __all__ = [name for name in __all__ if not _PLACES[name].startswith(("nn.", "masses"))]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'flowpool' has no attribute {name!r}")
    try:
        module = import_module(f"flowpool.{_PLACES[name]}")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("torch_geometric"):
            raise
        # AttributeError would let ``hasattr`` hide what is missing.
        raise ImportError(f"flowpool.{name} needs PyTorch Geometric: pip install 'flowpool[pyg]'.") from error
    found = module if name == _PLACES[name] else getattr(module, name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
