"""One of two processes that train on the device of ``elsewhere.py`` with DistributedDataParallel; prints what it found as JSON.

gloo serves the CPU and CUDA alone, so that this device brings collectives of its own: values go to the host, gloo sums them
there, and they come back.
"""

from __future__ import annotations

import copy
import json
import sys
from typing import Any

import elsewhere
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from flowpool import FlowReadout


class _Carried(dist.ProcessGroup):
    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self.host = dist.ProcessGroupGloo(dist.PrefixStore("carried", store), rank, size, timeout)

    def getBackendName(self) -> str:
        return "carried"

    def _through_host(self, collective: Any, tensors: list[Tensor], options: Any) -> Any:
        values = [tensor.cpu() for tensor in tensors]
        collective(values, options).wait()
        for tensor, value in zip(tensors, values, strict=True):
            tensor.copy_(value)
        done: Any = torch.futures.Future()
        done.set_result(tensors)
        return torch._C._distributed_c10d._create_work_from_future(done)

    def allreduce(self, tensors: list[Tensor], options: Any) -> Any:
        return self._through_host(self.host.allreduce, tensors, options)

    def broadcast(self, tensors: list[Tensor], options: Any) -> Any:
        return self._through_host(self.host.broadcast, tensors, options)

    def allgather(self, found: list[list[Tensor]], tensors: list[Tensor], options: Any) -> Any:
        return self._through_host(lambda values, _: self.host.allgather([values], [tensors[0].cpu()]), *found, options)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.linear, self.readout = nn.Linear(4, 4), FlowReadout(4, 3)
        self.head = nn.Linear(self.readout.out_channels, 1)

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        return self.head(self.readout(self.linear(x), index, dim_size=3))


def run(rank: int, meeting: str) -> dict[str, Any]:
    dist.Backend.register_backend("carried", _Carried, devices=["elsewhere"])
    dist.init_process_group("cpu:gloo,elsewhere:carried", f"file://{meeting}", rank=rank, world_size=2)
    model, mine = Model(), (elsewhere.BATCH % 2).eq(rank)

    def make(device: torch.device) -> Any:
        own = copy.deepcopy(model).to(device)
        wrapped = DistributedDataParallel(own)
        nodes, index = elsewhere.NODES[mine].to(device), (elsewhere.BATCH[mine] // 2).to(device)
        return lambda: wrapped(nodes, index), [*own.parameters(), *own.buffers()]

    found = elsewhere._compared(make)
    dist.destroy_process_group()
    return found


if __name__ == "__main__":
    print(json.dumps(run(int(sys.argv[1]), sys.argv[2])))
