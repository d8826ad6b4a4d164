"""FlowPool: pooling graph representations with Wasserstein gradient flows."""

from typing import TYPE_CHECKING, Any

from flowpool import costs, references
from flowpool.pooling import Pooled, flow_pool
from flowpool.status import Status

if TYPE_CHECKING:
    from flowpool.layer import FlowPool, register_with_pyg

__all__ = ["FlowPool", "Pooled", "Status", "costs", "flow_pool", "references", "register_with_pyg"]


def __getattr__(name: str) -> Any:
    """The layer, which needs torch_geometric, only when it is asked for."""
    if name in ("FlowPool", "register_with_pyg"):
        try:
            from flowpool import layer
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith("torch_geometric"):
                raise
            raise ImportError(f"flowpool.{name} needs PyTorch Geometric: pip install 'flowpool[pyg]'.") from error
        return getattr(layer, name)
    raise AttributeError(f"module 'flowpool' has no attribute {name!r}")
