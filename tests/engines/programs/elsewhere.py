"""A device that is not the CPU, and what pooling does with tensors there; prints one line of JSON per case.

PyTorch has a place for other people's devices and lets Python serve it. This one keeps its values in the memory of the host,
where nobody else finds them, and writes down every operation, every copy to or from the host, and every question for a value:
what an accelerator would be waited for. In a process of its own, since a device cannot be taken back.
"""

from __future__ import annotations

import copy
import json
import logging
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

from flowpool import FlowCoarsen, FlowPool, FlowReadout, costs, flow_pool, transport_pool
from flowpool.engines import devices

happened: list[str] = []
_values: dict[int, Tensor] = {}  # by the storage of the tensor that stands for them
_without_double = False
# Operations whose result, or its shape, the host must have before it goes on.
_ASKING = ("_local_scalar_dense", "nonzero", "masked_select", "bincount", "repeat_interleave", "_unique2", "equal")

said: list[str] = []


class _Keep(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        said.append(record.getMessage())


logging.getLogger("flowpool").addHandler(_Keep())


class _Module(_DummyBackendModule):
    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]


_setup_privateuseone_for_python_backend("elsewhere", _Module())


def _is_elsewhere(tensor: Tensor) -> bool:
    return tensor.device.type == "elsewhere"


def _standing_for(values: Tensor) -> Tensor:
    assert not (_without_double and values.dtype == torch.float64), "the device has no double precision"
    tensor = torch._C._acc.create_empty_tensor(tuple(values.shape), values.dtype)
    _values[tensor.untyped_storage()._cdata] = values
    return tensor


def _values_of(tensor: Tensor) -> Tensor:
    if not _is_elsewhere(tensor):
        return tensor
    values = _values[tensor.untyped_storage()._cdata]
    if values.shape == tensor.shape and values.dtype == tensor.dtype:
        return values
    values = values.contiguous()  # as the tensor says it is; nobody writes through the bytes of a view
    first = values.storage_offset() * values.itemsize // tensor.itemsize + tensor.storage_offset()
    return torch.empty(0, dtype=tensor.dtype).set_(values.untyped_storage(), first, tensor.size(), tensor.stride())


def _serve(operation: Any, *given: Any, **options: Any) -> Any:
    name = operation._schema.name.removeprefix("aten::")
    if name == "_copy_from":
        source, target = given[:2]
        happened.append(
            "inside" if _is_elsewhere(source) == _is_elsewhere(target) else "up" if _is_elsewhere(target) else "down"
        )
        _values_of(target).copy_(_values_of(source))
        return target
    happened.append(name)
    if name == "_local_scalar_dense":
        return _values_of(given[0]).item()
    if options.get("device") is not None:
        options["device"] = "cpu"
    tensors: dict[int, tuple[Tensor, Tensor]] = {}

    def values_of(tensor: Tensor) -> Tensor:
        values = _values_of(tensor)
        tensors[id(values)] = values, tensor
        return values

    given, options = tree_map_only(Tensor, values_of, (given, options))
    with torch._C._AutoDispatchBelowAutograd():
        # What stands for values says that it is contiguous, also where it is a view.
        if name == "view" and not isinstance(given[1], torch.dtype):
            found = given[0].reshape(given[1])
        elif name == "as_strided":
            found = given[0].contiguous().as_strided(*given[1:], **options)
        else:
            found = operation(*given, **options)
    for values, tensor in tensors.values():
        if values.shape != tensor.shape:  # an "out" that was made empty
            tensor.data = _standing_for(values)
    return tree_map_only(
        Tensor, lambda value: tensors[id(value)][1] if id(value) in tensors else _standing_for(value), found
    )


_library = torch.library.Library("_", "IMPL")
_library.fallback(_serve, dispatch_key="PrivateUse1")
_library.fallback(torch.library.fallthrough_kernel, dispatch_key="AutocastPrivateUse1")  # no operation has a rule there

THERE = torch.device("elsewhere:0")
GENERATOR = torch.Generator().manual_seed(0)
NODES = torch.randn(60, 4, generator=GENERATOR)
BATCH = torch.randint(6, (60,), generator=GENERATOR)
MASSES = torch.rand(60, generator=GENERATOR)
REFERENCE = torch.randn(3, 4, generator=GENERATOR)
EPSILON = torch.tensor(0.3)


def _crossings() -> dict[str, int]:
    """What happened since the last question: copies to the host and from it, and questions for values."""
    counts = {
        "down": happened.count("down"),
        "up": happened.count("up"),
        "asked": sum(map(happened.count, _ASKING)),
    }
    happened.clear()
    return counts


def _compared(
    make: Callable[[torch.device], tuple[Callable[[], Tensor], list[Tensor]]], compile: bool = False
) -> dict[str, Any]:
    """Results and gradients there and on the CPU, with the crossings of both passes.

    Args:
        make: from a device, a function of nothing, and the tensors that it has gradients in or changes.
    """
    found = []
    for device in (torch.device("cpu"), THERE):
        torch.compiler.reset()
        function, tensors = make(device)
        call = torch.compile(function, fullgraph=True, backend="aot_eager") if compile else function
        call()  # the first time compiles
        happened.clear()
        out = call()
        forward = _crossings()
        weights = torch.arange(out.numel(), device=device).view(out.shape).cos()  # BatchNorm makes some sums constant
        happened.clear()
        (out.square() * weights).sum().backward()
        backward = _crossings()
        assert out.device == device and all(t.grad is None or t.grad.device == device for t in tensors)
        found.append(
            [value.detach().cpu() for value in (out, *tensors, *(t.grad for t in tensors if t.grad is not None))]
        )
    equal = len(found[0]) == len(found[1]) and all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    near = max(float((a - b).abs().max() / b.abs().max().clamp(min=1)) for a, b in zip(*found, strict=True))
    return {
        "equal": equal,
        "near": near,
        "gradients": len(found[1]) - 1 - len(tensors),
        "forward": forward,
        "backward": backward,
    }


def _function(pool: Callable[..., Tensor]) -> Callable[[torch.device], Any]:
    def make(device: torch.device) -> Any:
        nodes, masses, epsilon = (t.clone().to(device).requires_grad_() for t in (NODES, MASSES, EPSILON))
        cost = costs.Mahalanobis(4).to(device)
        batch, reference = BATCH.to(device), REFERENCE.to(device)
        leaves = [nodes, masses, epsilon, cost.weight]
        return lambda: pool(
            nodes, batch, reference=reference, masses=masses, epsilon=epsilon, cost=cost, dim_size=6
        ), leaves

    return make


def _layer(layer: torch.nn.Module, *extra: Tensor) -> Callable[[torch.device], Any]:
    def make(device: torch.device) -> Any:
        own = copy.deepcopy(layer).to(device)
        nodes = NODES.clone().to(device).requires_grad_()
        batch, more = BATCH.to(device), [t.to(device) for t in extra]

        def call() -> Tensor:
            if isinstance(own, FlowCoarsen):
                found = own(nodes, *more, batch=batch, dim_size=6)
                return torch.cat([value.flatten() for value in (found.x, found.edge_weight, found.assignment)])
            return own(nodes, batch, dim_size=6)

        return call, [nodes, *own.parameters(), *own.buffers()]

    return make


def _flow(*given: Any, **options: Any) -> Tensor:
    return flow_pool(*given, **options).points


def _step(*given: Any, **options: Any) -> Tensor:
    return torch.cat([value.flatten(1) for value in transport_pool(*given, **options)[:3]], 1)


def records() -> dict[str, Any]:
    """Where everything is that pooling hands over, and what it says about that."""
    layer = FlowReadout(4, 3).to(THERE)
    for _ in range(2):
        nodes = NODES.to(THERE).requires_grad_()
        pooled = flow_pool(nodes, BATCH, reference=REFERENCE.to(THERE))  # ids may be on the host
        pooled.points.sum().backward()
        layer(nodes, BATCH.to(THERE))
    on_host = flow_pool(NODES, BATCH, reference=REFERENCE)
    happened.clear()
    on_device = transport_pool(nodes.detach(), BATCH.to(THERE), reference=REFERENCE.to(THERE), engine="torch").points
    stayed = _crossings()["down"] == 0
    expected = transport_pool(NODES, BATCH, reference=REFERENCE).points
    tensors = [pooled.points, pooled.residual, pooled.steps, pooled.status, pooled.converged, pooled.divergence]
    tensors += [pooled.plan(1), pooled.backward.residual, pooled.backward.damped, nodes.grad]
    tensors += [layer.report.status, layer.report.residual, layer.report.steps, layer.report.converged]
    return {
        "there": [value.device == THERE for value in tensors],
        "statuses": layer.report.status.tolist(),
        "equal": [
            torch.equal(pooled.plan(1).cpu(), on_host.plan(1)),
            torch.equal(pooled.divergence.cpu(), on_host.divergence),
            torch.equal(pooled.steps.cpu(), on_host.steps),
        ],
        "where": [pooled.where, on_host.where],
        "report": str(layer.report),
        "said": [line for line in said if "CPU" in line],
        "torch engine": [stayed, float((on_device.cpu() - expected).abs().max()) < 1e-5],
    }


def autocast() -> dict[str, Any]:
    """Features in half precision, as a layer under autocast gets them, with masses that are not."""

    def make(device: torch.device) -> Any:
        nodes, masses = NODES.to(torch.bfloat16).to(device).requires_grad_(), MASSES.to(device)
        pool, readout = FlowPool(4, 3).to(device), FlowReadout(4, 3).to(device)

        def call() -> Tensor:
            with torch.autocast(device.type, torch.bfloat16):
                vectors = [layer(nodes, BATCH.to(device), dim_size=6, masses=masses) for layer in (pool, readout)]
                return torch.cat(vectors, 1)

        return call, [nodes, *readout.parameters(), *readout.buffers()]

    return _compared(make)


def single() -> dict[str, Any]:
    """A device without double precision: nothing of it may arrive there."""
    global _without_double
    devices._WITHOUT_DOUBLE.append("elsewhere")
    _without_double = True
    nodes = NODES.to(THERE).requires_grad_()
    pooled = flow_pool(nodes, BATCH, reference=REFERENCE.to(THERE), epsilon=EPSILON.to(THERE))
    pooled.points.sum().backward()
    readout = FlowReadout(4, 3).to(THERE)
    readout(nodes, BATCH).sum().backward()
    read = [pooled.residual, pooled.divergence, pooled.plan(0), pooled.backward.residual, readout.report.residual]
    expected = flow_pool(NODES, BATCH, reference=REFERENCE, epsilon=EPSILON).points
    return {"single": [str(value.dtype) for value in read], "equal": torch.equal(pooled.points.cpu(), expected)}


def apart() -> dict[str, Any]:
    """Epsilon stays on the host, as a number that is learned there; its gradient does, too."""
    found = []
    for device in (torch.device("cpu"), THERE):
        nodes, epsilon = NODES.clone().to(device).requires_grad_(), EPSILON.clone().requires_grad_()
        points = flow_pool(nodes, BATCH, reference=REFERENCE.to(device), epsilon=epsilon).points
        happened.clear()
        points.square().sum().backward()
        crossed = _crossings()
        found.append([points.detach().cpu(), nodes.grad.cpu(), epsilon.grad])
    return {"equal": all(map(torch.equal, *found)), "backward": crossed, "epsilon": str(found[1][2].device)}


def trouble() -> dict[str, Any]:
    """What is wrong with tensors there is said as on the CPU."""
    broken = NODES.clone()
    broken[BATCH == 2] = torch.nan
    layer = FlowPool(4, 3, on_failure="raise").to(THERE)
    errors = []
    for call in (
        lambda: layer(broken.to(THERE), BATCH.to(THERE)),
        lambda: flow_pool(NODES.to(THERE), BATCH.to(THERE) - 1, reference=REFERENCE.to(THERE)),
        lambda: flow_pool(NODES.to(THERE), BATCH.to(THERE), reference=REFERENCE),
        lambda: flow_pool(NODES.to(THERE), reference=REFERENCE.to(THERE), engine="compiled", cost="euclidean"),
    ):
        try:
            call()
        except (ValueError, ArithmeticError) as error:
            errors.append(str(error))
    return {"said": errors}


_ORDER = BATCH.argsort(stable=True)
_INSIDE = BATCH[_ORDER][1:] == BATCH[_ORDER][:-1]
EDGES = torch.stack([_ORDER[:-1][_INSIDE], _ORDER[1:][_INSIDE]])  # a path through each graph
WEIGHTED = costs.Mahalanobis(4)
CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "flow_pool": lambda: _compared(_function(_flow)),
    "flow_pool compiled": lambda: _compared(_function(_flow), compile=True),
    "transport_pool": lambda: _compared(_function(_step)),
    "transport_pool compiled": lambda: _compared(_function(_step), compile=True),
    "FlowPool": lambda: _compared(_layer(FlowPool(4, 3, size="append", learn_epsilon=True))),
    "FlowPool compiled": lambda: _compared(_layer(FlowPool(4, 3, size="append", learn_epsilon=True)), compile=True),
    "FlowReadout": lambda: _compared(_layer(FlowReadout(4, 3))),
    "FlowReadout compiled": lambda: _compared(_layer(FlowReadout(4, 3)), compile=True),
    "FlowCoarsen": lambda: _compared(_layer(FlowCoarsen(4, 3, cost=WEIGHTED), EDGES)),
    "FlowReadout in evaluation": lambda: _compared(_layer(FlowReadout(4, 3).eval())),
    "autocast": autocast,
    "records": records,
    "apart": apart,
    "trouble": trouble,
    "single": single,
}

if __name__ == "__main__":
    for name in sys.argv[1:] or CASES:
        print(json.dumps({"case": name, **CASES[name]()}), flush=True)
