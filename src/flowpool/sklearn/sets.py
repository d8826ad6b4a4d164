"""What a user may pass as sets, read into one record: flat arrays, and where each set begins."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.utils._missing import is_pandas_na

Floats = NDArray[np.floating]
Integers = NDArray[np.int64]

_STACKED = "Pass a list of (N_i, D) arrays, or one stacked (N, D) array with groups= or offsets=."
_LARGEST = np.float64(1e150)  # squares of distances are numbers
_NO_SETS = "There are no sets; pass at least one."


@dataclass(frozen=True, eq=False)
class Sets:
    """B sets in the manner of CSR matrices.

    Attributes:
        members: vectors of all sets in order, ``(N, D)``, float32 or float64.
        ptr: set g owns the members ``ptr[g] : ptr[g + 1]``, ``(B + 1,)``.
        weights: of the members, ``(N,)``, as given; None: all the same.
    """

    members: Floats
    ptr: Integers
    weights: NDArray[np.float64] | None = None

    def __len__(self) -> int:
        return len(self.ptr) - 1

    @property
    def totals(self) -> NDArray[np.float64]:
        """Sum of the weights of each set, which is the number of its members where none were given, ``(B,)``."""
        if self.weights is None:
            return np.diff(self.ptr).astype(np.float64)
        return self.sum(self.weights)

    @property
    def masses(self) -> NDArray[np.float64]:
        """Weights that sum to one in each set, ``(N,)``."""
        totals = np.repeat(self.totals, np.diff(self.ptr))
        masses: NDArray[np.float64] = (1.0 if self.weights is None else self.weights) / totals
        return masses

    def sum(self, values: NDArray[Any]) -> NDArray[Any]:
        """Sums over the members of each set, ``(B, ...)``; no set is empty."""
        return np.add.reduceat(values, self.ptr[:-1], axis=0)

    def part(self, first: int, last: int) -> Sets:
        """The sets ``first .. last - 1``, without a copy."""
        members = slice(self.ptr[first], self.ptr[last])
        weights = None if self.weights is None else self.weights[members]
        return Sets(self.members[members], self.ptr[first : last + 1] - self.ptr[first], weights)

    def parts(self, rows: int) -> Iterator[Sets]:
        """The sets in parts of about so many members, each part at least one set."""
        first = 0
        while first < len(self):
            last = int(np.searchsorted(self.ptr, self.ptr[first] + rows, side="right")) - 1
            last = min(max(last, first + 1), len(self))
            yield self.part(first, last)
            first = last

    def arrays(self) -> list[Floats]:
        """One ``(N_i, D)`` array per set, without a copy."""
        return np.split(self.members, self.ptr[1:-1])

    def with_members(self, members: Floats) -> Sets:
        return replace(self, members=members)


def read_sets(
    sets: Any,
    sample_weight: Any = None,
    *,
    groups: ArrayLike | None = None,
    offsets: ArrayLike | None = None,
) -> Sets:
    """The sets that a user passed, checked.

    Args:
        sets: a sequence of B arrays ``(N_i, D)``, or of objects that hold one as ``x`` (as ``torch_geometric.data.Data``
            does); an array ``(B, N, D)`` of sets of equal size; or, with ``groups`` or ``offsets``, an array ``(N, D)``.
        sample_weight: one array ``(N_i,)`` per set, or one ``(N,)`` for a stacked array; not negative, and not all zero
            in any set. None: all members count the same.
        groups: set of each row of a stacked array, ``(N,)``. The sets come in the order of their sorted numbers.
        offsets: or where each set begins in it, and the end, ``(B + 1,)``.
    """
    if groups is not None and offsets is not None:
        raise ValueError("Both groups and offsets are given; pass the one that you have.")
    if groups is not None:
        return _grouped(sets, sample_weight, as_array(groups))
    if offsets is not None:
        stacked = _stacked(sets)
        ptr = _checked_offsets(np.asarray(offsets), len(stacked))
        return _checked(Sets(stacked, ptr, _flat_weights(sample_weight, len(stacked))))
    arrays = _arrays(sets)
    if not arrays:
        raise ValueError(_NO_SETS)
    ptr = np.concatenate([[0], np.cumsum([len(array) for array in arrays])]).astype(np.int64)
    weights = _weights(sample_weight, arrays)
    # np.result_type would widen float16 and integers step by step; one decision for all is easier to foresee.
    single = all(array.dtype in (np.float32, np.float16) for array in arrays)
    # Row by row whatever the order of the parts, so that sums are the same to the last bit.
    members = np.ascontiguousarray(np.concatenate(arrays, dtype=np.float32 if single else np.float64))
    return _checked(Sets(members, ptr, weights))


def as_array(value: Any) -> NDArray[Any]:
    """An array of anything array-like, PyTorch tensors with gradients included."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = value.float() if value.is_floating_point() and value.itemsize < 4 else value  # NumPy has no bfloat16
    if np.ma.is_masked(value):
        raise ValueError(
            f"An array has {np.ma.count_masked(value)} masked values. Impute or leave out what is missing."
        )
    return np.asarray(value)


def as_list(graphs: Any) -> Any:
    """The graphs of a PyTorch Geometric ``Batch``; other collections as they are, and a single graph is refused."""
    if hasattr(type(graphs), "to_data_list"):
        return graphs.to_data_list()
    if hasattr(type(graphs), "edge_index"):
        raise TypeError(f"Found a single {type(graphs).__name__} where a list of graphs is expected; pass [graph].")
    return graphs


def _grouped(sets: Any, sample_weight: Any, groups: NDArray[Any]) -> Sets:
    stacked = _stacked(sets)
    if groups.shape != (len(stacked),):
        raise ValueError(f"groups has shape {groups.shape} for {len(stacked)} rows; pass the set of each row.")
    if groups.dtype != object:
        missing = groups != groups  # noqa: PLR0124 - NaN, in numbers of any kind
    else:
        missing = np.array([value is None or is_pandas_na(value) or value != value for value in groups])  # noqa: PLR0124
    if missing.any():
        raise ValueError(
            f"groups is missing for {int(missing.sum())} rows (first: row {int(np.argmax(missing))}). Say which set they "
            "belong to, or leave them out."
        )
    weights = _flat_weights(sample_weight, len(stacked))
    try:
        _, numbers = np.unique(groups, return_inverse=True)
    except TypeError as error:
        raise ValueError(f"groups cannot be sorted ({error}); number the sets.") from None
    ptr = np.concatenate([[0], np.cumsum(np.bincount(numbers))]).astype(np.int64)
    if (np.diff(numbers) < 0).any():
        order = np.argsort(numbers, kind="stable")
        stacked, weights = stacked[order], None if weights is None else weights[order]
    return _checked(Sets(stacked, ptr, weights))


def _stacked(sets: Any) -> Floats:
    stacked = _real(as_array(sets), "The stacked array")
    if stacked.ndim != 2:
        raise ValueError(f"The stacked array has shape {stacked.shape}; with groups or offsets it must be (N, D).")
    return stacked.astype(np.float32 if stacked.dtype in (np.float32, np.float16) else np.float64, copy=False)


def _arrays(sets: Any) -> Sequence[NDArray[Any]]:
    sets = as_list(sets)
    if hasattr(sets, "detach"):
        sets = as_array(sets)
    if isinstance(sets, np.ndarray) and sets.dtype != object:
        if sets.ndim != 3:
            raise ValueError(f"Found one array of shape {sets.shape} where sets are expected. {_STACKED}")
        return list(_real(sets, "The array"))
    is_table = hasattr(sets, "shape") and not isinstance(sets, np.ndarray)
    if is_table or isinstance(sets, str | bytes) or not hasattr(sets, "__len__"):
        # A data frame or sparse matrix of its own is one table, not a list of sets.
        raise TypeError(f"Found a {type(sets).__name__} where sets are expected. {_STACKED}")
    arrays: list[NDArray[Any]] = []
    for number, entry in enumerate(sets):
        # An array is a set itself, also a data frame that has a column x.
        members = entry if hasattr(entry, "__array__") else getattr(entry, "x", entry)
        if members is None:
            raise ValueError(f"Set {number} has no x. Put Propagate before, which takes degrees for missing features.")
        array = _real(as_array(members), f"Set {number}")
        if array.ndim != 2:
            raise ValueError(f"Set {number} has shape {array.shape}; a set is an (N, D) array, one row per member.")
        if array.shape[1] != (width := arrays[0].shape[1] if arrays else array.shape[1]):
            raise ValueError(f"Set {number} has {array.shape[1]} features and set 0 has {width}; all need the same.")
        arrays.append(array)
    return arrays


def _real(array: NDArray[Any], name: str) -> NDArray[Any]:
    if array.dtype.kind not in "fiub":
        raise ValueError(f"{name} holds {array.dtype} values; pass real numbers.")
    return array


def _weights(sample_weight: Any, arrays: Sequence[NDArray[Any]]) -> NDArray[np.float64] | None:
    if sample_weight is None:
        return None
    if not hasattr(sample_weight, "__len__") or len(sample_weight) != len(arrays):
        found = len(sample_weight) if hasattr(sample_weight, "__len__") else sample_weight
        raise ValueError(
            f"sample_weight has {found} entries for {len(arrays)} sets; pass one array of weights per set."
        )
    weights = [_real(as_array(entry), f"sample_weight of set {number}") for number, entry in enumerate(sample_weight)]
    for number, (own, array) in enumerate(zip(weights, arrays, strict=True)):
        if own.shape != (len(array),):
            raise ValueError(
                f"sample_weight of set {number} has shape {own.shape}; the set has {len(array)} members, each with a weight."
            )
    return np.concatenate(weights, dtype=np.float64)


def _flat_weights(sample_weight: Any, num_members: int) -> NDArray[np.float64] | None:
    if sample_weight is None:
        return None
    weights = _real(as_array(sample_weight), "sample_weight")
    if weights.shape != (num_members,):
        raise ValueError(f"sample_weight has shape {weights.shape}; the stacked array has {num_members} rows.")
    return weights.astype(np.float64)


def _checked_offsets(offsets: NDArray[Any], num_members: int) -> Integers:
    if offsets.ndim != 1 or len(offsets) < 2 or offsets.dtype.kind not in "iu":
        raise ValueError(f"offsets is {offsets.dtype} of shape {offsets.shape}; pass B + 1 integers.")
    if offsets[0] != 0 or offsets[-1] != num_members or (np.diff(offsets.astype(np.int64)) < 0).any():
        raise ValueError(
            f"offsets run from {offsets[0]} to {offsets[-1]}; they must rise from 0 to the number of rows, {num_members}."
        )
    return offsets.astype(np.int64)


def _checked(sets: Sets) -> Sets:
    """The sets, which are neither empty nor without weight, and finite."""
    sizes = np.diff(sets.ptr)
    if len(sizes) == 0:
        raise ValueError(_NO_SETS)
    if (empty := np.flatnonzero(sizes == 0)).size:
        raise ValueError(
            f"{len(empty)} sets are empty (first: set {empty[0]}). Leave them out: they have no distribution."
        )
    if sets.members.shape[1] == 0:
        raise ValueError(f"The sets have 0 feature(s) (shape={sets.members.shape}) while a minimum of 1 is required.")
    # Bounds need no memory, and are NaN if a member is.
    if not (sets.members.min() >= -_LARGEST and sets.members.max() <= _LARGEST):
        unusable = ~(np.abs(sets.members) <= _LARGEST).all(axis=1)
        _fail(sets, unusable, f"hold NaN, infinity or values beyond {_LARGEST:g}", "Impute, leave out or scale them")
    if sets.weights is not None:
        if not (valid := np.isfinite(sets.weights) & (sets.weights >= 0)).all():
            _fail(sets, ~valid, "have weights that are negative, NaN or infinity", "Weights are masses, zero or above")
        if (nothing := np.flatnonzero(sets.totals == 0)).size:
            raise ValueError(f"All weights of {len(nothing)} sets are zero (first: set {nothing[0]}). Leave them out.")
        if (endless := np.flatnonzero(np.isinf(sets.totals))).size:
            raise ValueError(
                f"The weights of {len(endless)} sets sum to more than a number can hold (first: set {endless[0]}). Divide "
                "them by their largest."
            )
    return sets


def _fail(sets: Sets, bad: Any, what: str, advice: str) -> None:
    first = int(np.argmax(bad))
    number = int(np.searchsorted(sets.ptr, first, side="right")) - 1
    raise ValueError(
        f"{int(bad.sum())} members of the sets {what} (first: set {number}, member {first - sets.ptr[number]}). {advice}."
    )


def shown(items: Iterable[Any], count: int, what: str, verbose: bool) -> Iterable[Any]:
    """The items, and on stderr how many of them are done, if asked for."""
    if not verbose:
        return items
    from rich.console import Console
    from rich.progress import track

    return track(items, what, total=count, console=Console(stderr=True))
