"""FlowPool: pooling graph representations with Wasserstein gradient flows."""

from flowpool import costs, references
from flowpool.pooling import Pooled, flow_pool
from flowpool.status import Status

__all__ = ["Pooled", "Status", "costs", "flow_pool", "references"]
