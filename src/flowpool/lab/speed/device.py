"""What a call asks of a device: operations, waits and copies, and its time beside PyTorch Geometric's layers there.

An operation is one that computes, not a view. A wait is a question for a value, or a copy to the host, for which the
device must have finished all that was asked before. Layers take turns, since machines change their pace.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flowpool.lab.datasets import DatasetNotFoundError
from flowpool.lab.speed.cases import GRAPH_CASES, Case, graph_case
from flowpool.lab.speed.peers import BASE, pooling_layers
from flowpool.lab.speed.turns import in_turns, passes, processor
from flowpool.nn.pool import FlowPool
from flowpool.nn.readout import FlowReadout

# Operations whose result, or its shape, the host must have before it goes on.
ASKING = ("_local_scalar_dense", "nonzero", "masked_select", "bincount", "repeat_interleave", "_unique2", "equal")


@dataclass(frozen=True)
class DeviceRow:
    """One line of the table: a pass of a layer over a batch."""

    case: str
    method: str
    which: str  # forward or backward
    operations: int
    waits: int
    copies: int  # between host and device, either way
    milliseconds: float  # the median
    ratio: float | None  # time of both passes / that of GraphMultisetTransformer in the same run


class Counter(TorchDispatchMode):
    """Counts what a device is asked for inside its ``with``."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.operations = self.waits = self.copies = 0

    def __torch_dispatch__(self, function: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        found = function(*given, **(named or {}))
        name = function._schema.name.removeprefix("aten::")
        tensors = [value for value in tree_leaves((given, named, found)) if isinstance(value, Tensor)]
        if all(tensor.device.type != self.device.type for tensor in tensors):
            return found
        self.operations += not function.is_view
        if name in ASKING:
            self.waits += 1
        elif name in ("_to_copy", "copy_"):
            source = given[0] if name == "_to_copy" else given[1]
            if source.device != found.device:
                self.copies += 1
                self.waits += found.device.type == "cpu"
        return found


def layers_of(case: Case, device: torch.device) -> dict[str, nn.Module]:
    """The layers to be looked at; on the CPU, the form of the readout that devices run."""
    engine: Any = {"engine": "torch"} if device.type == "cpu" else {}
    torch.manual_seed(0)
    ours = {
        "FlowReadout": FlowReadout(case.width, case.num_points, **engine),
        "FlowPool": FlowPool(case.width, case.num_points),
    }
    return ours | pooling_layers(case.width, case.num_points)


def measure(case: Case, device: torch.device, layers: Mapping[str, nn.Module], rounds: int = 20) -> Iterator[DeviceRow]:
    """Two rows for each layer."""
    nodes, batch = case.nodes.to(device).requires_grad_(), case.batch.to(device)
    calls: dict[str, Callable[[], Tensor]] = {
        name: partial(layer.to(device), nodes, batch, dim_size=case.num_graphs) for name, layer in layers.items()
    }
    seeds = {name: torch.ones_like(call().detach()) for name, call in calls.items()}  # loads and compiles, too
    wait = getattr(torch.get_device_module(device), "synchronize", lambda: None)
    taken = in_turns({name: passes(call, seeds[name], wait=wait) for name, call in calls.items()}, rounds)
    medians = {name: [statistics.median(times) for times in zip(*own, strict=True)] for name, own in taken.items()}
    for name, call in calls.items():
        with Counter(device) as forward_counts:
            out = call()
        with Counter(device) as backward_counts:
            out.backward(seeds[name])
        both = zip(("forward", "backward"), (forward_counts, backward_counts), medians[name], strict=True)
        for which, counted, seconds in both:
            ratio = sum(medians[name]) / sum(medians[BASE]) if BASE in medians else None
            yield DeviceRow(
                case.name, name, which, counted.operations, counted.waits, counted.copies, 1e3 * seconds, ratio
            )


def run_on_device(name: str, data: str | None = None) -> Iterator[DeviceRow]:
    """The rows of every case whose dataset is on this machine."""
    device = _checked(name)
    for dataset, width, num_points in GRAPH_CASES:
        try:
            case = graph_case(dataset, width, num_points, data=data)
        except DatasetNotFoundError:
            continue
        yield from measure(case, device, layers_of(case, device))


def device_name(name: str) -> str:
    """What the device is called, for whoever reads the table."""
    device = torch.device(name)
    describe = getattr(torch.get_device_module(device), "get_device_name", None)
    return processor() if device.type == "cpu" else str(describe(device)) if describe else str(device)


def _checked(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"The device {name!r} cannot be used here: {str(error).splitlines()[0]}") from None
    return device
