"""Peak of the memory that tensors hold during a computation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class TensorMemory(TorchDispatchMode):
    """Counts the bytes of all tensors that were born inside it and are still alive, to one per cent.

    It sees forward and backward pass, and what autograd keeps between them. It does not see scratch space that lives
    within one operation, nor what existed before.

    Attributes:
        peak: bytes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._held = 0  # bytes of all tensors in _alive, some of which may have died since
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        before = {_key(leaf) for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, torch.Tensor)}
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            # A view, or an operation in place, gives back memory that was there before.
            if isinstance(leaf, torch.Tensor) and _key(leaf) not in before:
                storage = leaf.untyped_storage()
                self._alive[_key(leaf)] = (StorageWeakRef(storage), storage.nbytes())
                self._held += storage.nbytes()
        # Looking for the dead takes time; it is done only when the peak may have moved by one per cent.
        if self._held > 1.01 * self.peak:
            self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
            self._held = sum(size for _, size in self._alive.values())
            self.peak = max(self.peak, self._held)
        return result


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
