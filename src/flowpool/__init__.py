"""FlowPool: pooling graph representations with Wasserstein gradient flows."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from flowpool import costs, references
from flowpool.pooling import Pooled, flow_pool
from flowpool.status import Status
from flowpool.transport import transport_pool

if TYPE_CHECKING:
    from flowpool import masses
    from flowpool.coarsen import FlowCoarsen
    from flowpool.layer import FlowPool, register_with_pyg
    from flowpool.readout import FlowReadout

__all__ = [
    "FlowCoarsen",
    "FlowPool",
    "FlowReadout",
    "Pooled",
    "Status",
    "costs",
    "flow_pool",
    "masses",
    "references",
    "register_with_pyg",
    "transport_pool",
]

# What needs torch_geometric, and the module where it stands.
_LATER = {
    "FlowCoarsen": "coarsen",
    "FlowPool": "layer",
    "FlowReadout": "readout",
    "masses": "masses",
    "register_with_pyg": "layer",
}


def __getattr__(name: str) -> Any:
    """What needs torch_geometric, only when it is asked for."""
    if name not in _LATER:
        raise AttributeError(f"module 'flowpool' has no attribute {name!r}")
    try:
        module = import_module(f"flowpool.{_LATER[name]}")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("torch_geometric"):
            raise
        raise ImportError(f"flowpool.{name} needs PyTorch Geometric: pip install 'flowpool[pyg]'.") from error
    return module if name == _LATER[name] else getattr(module, name)
