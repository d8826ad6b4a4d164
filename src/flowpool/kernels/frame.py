"""Order and frames of a whole batch in a few passes over its nodes, and gradients on their way out of the frames.

:func:`~flowpool.core.measures.make_clouds` and :func:`~flowpool.core.frame.make_frame` are the specification, for the squared
Euclidean cost of weighted features: a node x of a graph with mean m becomes ``y = w (x - m) / U``, where U makes the variances of
the y sum to one. All features weigh ``w = 1`` in the plain cost. Sums go over the nodes of one graph, in their order.
"""

from __future__ import annotations

import math

import numpy as np

from flowpool.core.constants import FARAWAY
from flowpool.kernels.machine.jit import entry, kernel, shared
from flowpool.status import Status

POINTLESS = 1e-13  # spread of a cloud, relative to its largest entry, below which it is one point

OK, NOTHING, NONFINITE_INPUT = Status.OK.value, Status.EMPTY.value, Status.NONFINITE_INPUT.value
SINGULAR, NONFINITE = Status.SINGULAR.value, Status.NONFINITE.value

# What a graph is.
CLOUD, SINGLE, EMPTY, BROKEN = 0, 1, 2, 3


@kernel
def sort_stable(order, spare, keys, first, last):  # type: ignore[no-untyped-def]
    """Sorts ``order[first : last]`` by the keys of its entries, by merging; equal keys keep their order."""
    width, source, target, turned = 1, order, spare, False
    while width < last - first:
        for begin in range(first, last, 2 * width):
            middle, end = min(begin + width, last), min(begin + 2 * width, last)
            left, right = begin, middle
            for place in range(begin, end):
                if left < middle and (right >= end or not keys[source[right]] < keys[source[left]]):
                    target[place] = source[left]
                    left += 1
                else:
                    target[place] = source[right]
                    right += 1
        source, target, turned = target, source, not turned
        width *= 2
    if turned:
        for place in range(first, last):
            order[place] = spare[place]


@entry
def order_nodes(nodes, graph, ptr, direction, order, spare, keys):  # type: ignore[no-untyped-def]
    """Fills ``order``, ``(N,)``: nodes by graph, in a graph by their features along a direction, then as given."""
    following = ptr.copy()
    for node in range(len(graph)):
        key = 0.0
        for d in range(nodes.shape[1]):
            key += nodes[node, d] * direction[d]
        keys[node] = key
        order[following[graph[node]]] = node
        following[graph[node]] += 1
    for g in range(len(ptr) - 1):
        sort_stable(order, spare, keys, ptr[g], ptr[g + 1])


@entry
def share_masses(given, order, ptr, masses):  # type: ignore[no-untyped-def]
    """Fills the masses of the ordered nodes, ``(N,)``, that sum to one in each graph."""
    for graph in range(len(ptr) - 1):
        total = 0.0
        for node in range(ptr[graph], ptr[graph + 1]):
            total += given[order[node]]
        for node in range(ptr[graph], ptr[graph + 1]):
            masses[node] = given[order[node]] / total


@entry
def unshare_masses(grad, given, order, ptr, to_given):  # type: ignore[no-untyped-def]
    """Fills the gradient in the masses as given from that in the shares of the ordered nodes."""
    for graph in range(len(ptr) - 1):
        total, moment = 0.0, 0.0
        for node in range(ptr[graph], ptr[graph + 1]):
            total += given[order[node]]
            moment += given[order[node]] * grad[node]
        for node in range(ptr[graph], ptr[graph + 1]):
            to_given[order[node]] = (grad[node] - moment / total) / total


@entry
def find_frames(nodes, masses, ptr, weights, mean, scale, share, radius, unit, kind):  # type: ignore[no-untyped-def]
    """Fills the frame of each graph.

    Args:
        nodes, masses: ordered, ``(N, D)`` and ``(N,)``.
        weights: w, ``(D,)``.
        mean: m, ``(B, D)``.
        scale: U / w, ``(B, D)``.
        share: variance of each feature in the frame, ``(B, D)``.
        radius: R, for which the variances of the nodes sum to R^2, ``(B,)``.
        unit: U, ``(B,)``.
        kind: ``(B,)``.
    """
    features = nodes.shape[1]
    for graph in range(len(kind)):
        first, last = ptr[graph], ptr[graph + 1]
        for d in range(features):
            mean[graph, d] = 0.0
            scale[graph, d] = 1.0
            share[graph, d] = 0.0
        radius[graph] = unit[graph] = 1.0
        kind[graph] = EMPTY
        if first == last:
            continue
        largest, finite, heavy = 0.0, True, 0
        for node in range(first, last):
            heavy += masses[node] > 0.0
            for d in range(features):
                value = np.float64(nodes[node, d])
                finite = finite and math.isfinite(value)
                mean[graph, d] += masses[node] * value
                if masses[node] > 0.0:
                    largest = max(largest, abs(value))
        if not finite:
            for d in range(features):
                mean[graph, d] = 0.0
            kind[graph] = BROKEN
            continue
        # Squares of the features themselves could overflow.
        spread, weighted_spread = 0.0, 0.0
        for node in range(first, last):
            if masses[node] > 0.0:
                for d in range(features):
                    apart = abs(nodes[node, d] - mean[graph, d])
                    spread = max(spread, apart)
                    weighted_spread = max(weighted_spread, apart * weights[d])
        radius[graph] = spread if spread > 0.0 else 1.0
        unit[graph] = weighted_spread if weighted_spread > 0.0 else 1.0
        variance = 0.0
        for node in range(first, last):
            if masses[node] > 0.0:  # the square of another could overflow
                for d in range(features):
                    apart = nodes[node, d] - mean[graph, d]
                    part = apart / radius[graph]
                    variance += masses[node] * (part * part)
                    part = apart * weights[d] / unit[graph]
                    share[graph, d] += masses[node] * (part * part)
        weighted_variance = 0.0
        for d in range(features):
            weighted_variance += share[graph, d]
        kind[graph] = SINGLE
        if heavy > 1 and spread > POINTLESS * largest and variance > 0.0 and weighted_variance > 0.0:
            kind[graph] = CLOUD
            radius[graph] *= math.sqrt(variance)
            unit[graph] *= math.sqrt(weighted_variance)
            for d in range(features):
                share[graph, d] /= weighted_variance
        for d in range(features):
            scale[graph, d] = unit[graph] / weights[d]


@entry
def enter_frames(nodes, ptr, graphs, mean, scale, framed):  # type: ignore[no-untyped-def]
    """Fills the nodes of some graphs in their frames, rows of ``(N, D)``."""
    for graph in graphs:
        for node in range(ptr[graph], ptr[graph + 1]):
            for d in range(nodes.shape[1]):
                framed[node, d] = (nodes[node, d] - mean[graph, d]) / scale[graph, d]


@entry
def place_start(reference, relative, point_masses, mean, scale, radius, unit, given_epsilon, start, epsilon):  # type: ignore[no-untyped-def]
    """Fills X^(0) ``(B, M, D)`` and epsilon ``(B,)`` in the frames, from units of R around the mean if they are relative.

    A start that is far away is moved to the nodes (:data:`~flowpool.core.constants.FARAWAY`).
    """
    for graph in range(start.shape[0]):
        epsilon[graph] = given_epsilon[graph] if relative else given_epsilon[graph] / (unit[graph] * unit[graph])
        for i in range(start.shape[1]):
            for d in range(start.shape[2]):
                if relative:
                    start[graph, i, d] = radius[graph] / scale[graph, d] * reference[i, d]
                else:
                    start[graph, i, d] = (reference[i, d] - mean[graph, d]) / scale[graph, d]
        away = 0.0
        for d in range(start.shape[2]):
            middle = 0.0
            for i in range(start.shape[1]):
                middle += point_masses[i] * start[graph, i, d]
            away += middle * middle
        if away > FARAWAY * FARAWAY:
            for d in range(start.shape[2]):
                middle = 0.0
                for i in range(start.shape[1]):
                    middle += point_masses[i] * start[graph, i, d]
                for i in range(start.shape[1]):
                    start[graph, i, d] -= middle


@entry
def place_points(points, mean, scale, kind, singular, residual, status, placed):  # type: ignore[no-untyped-def]
    """Fills X* outside the frames, in the precision of the caller, with the status and the residual of each graph.

    A graph that is one point is pooled to copies of it, an empty one to zeros: both sit at their frame's origin.

    Args:
        points, singular: of :class:`flowpool.kernels.engine.Solved`.
        residual: ``(B,)``; NaN where there is no meaning in it.
        status: ``(B,)``, as the solver gave it; becomes a code of :class:`flowpool.Status`.
        placed: ``(B, M, D)``.
    """
    for graph in range(len(kind)):
        finite = True
        for i in range(placed.shape[1]):
            for d in range(placed.shape[2]):
                placed[graph, i, d] = mean[graph, d] + scale[graph, d] * points[graph, i, d]
                finite = finite and math.isfinite(placed[graph, i, d])
        if status[graph] == NONFINITE or kind[graph] == BROKEN:
            residual[graph] = math.nan
        if kind[graph] == BROKEN:
            status[graph] = NONFINITE_INPUT
            placed[graph] = math.nan
        elif math.isnan(residual[graph]) or not finite:
            status[graph] = NONFINITE
        elif kind[graph] == EMPTY:
            status[graph] = NOTHING
        elif status[graph] == OK and singular[graph]:
            status[graph] = SINGULAR


@shared
def frame_response(  # type: ignore[no-untyped-def]
    graph, kind, scale, share, weights, points, cotangent, total, moment, to_radius, relative, frame, to_weights,
):  # fmt: skip
    """How the frame of a graph answers to gradients: what is added to those that its nodes have in the frame.

    Fills shift, stretch, tilt and bend, rows of ``frame``, ``(4, D)``: the gradient in a node of mass b, in the frame y, is
    ``grad y / scale + b (shift + stretch y)``, and that in its mass ``grad b + tilt . y + bend . y^2``.

    Args:
        points: X* in the frame, ``(B, M, D)``.
        cotangent: gradient in X* outside, ``(B, M, D)``.
        total, moment: sums over the nodes, and over points that depend on the frame as they do, of ``grad y`` and of
            ``y grad y``, ``(D,)``.
        to_radius: gradient in R, in units of 1/R; a relative start depends on it.
        relative: otherwise mean and unit of the frame are constants, but for the mean of a graph that is one point.
        to_weights: gets the gradient in w, ``(B, D)``.
    """
    count, features = points.shape[1], points.shape[2]
    to_unit = 0.0
    for d in range(features):
        outer, inner = 0.0, 0.0
        for i in range(count):
            outer += cotangent[graph, i, d]
            inner += cotangent[graph, i, d] * points[graph, i, d]
        to_scale = inner - moment[d] / scale[graph, d]
        frame[0, d] = outer - total[d] / scale[graph, d] if relative or kind[graph] != CLOUD else 0.0
        frame[2, d] = frame[0, d] * scale[graph, d]
        to_unit += to_scale / weights[d]
        to_weights[graph, d] = -to_scale * scale[graph, d] / weights[d]
    if not relative or kind[graph] != CLOUD:
        to_unit = 0.0
    for d in range(features):
        frame[1, d] = to_unit * weights[d] + to_radius * scale[graph, d]
        frame[3, d] = 0.5 * frame[1, d] * scale[graph, d]
        to_weights[graph, d] += to_unit * scale[graph, d] * share[graph, d]


@entry
def leave_frames(  # type: ignore[no-untyped-def]
    framed, masses, ptr, order, graphs, kind, scale, share, weights, points, cotangent, relative, grad_nodes, grad_masses,
    begun_moment, begun_radius, scratch, to_nodes, to_masses, to_weights,
):  # fmt: skip
    """Fills gradients of some graphs from those in their frames.

    Args:
        framed: the ordered nodes in their frames, ``(N, D)``.
        grad_nodes, grad_masses: in the frames, ``(N, D)`` and ``(N,)``.
        begun_moment, begun_radius: what flat directions, along which nothing moves the points, add to the moment of
            :func:`frame_response`, ``(B, D)``, and their gradient in R, ``(B,)``.
        scratch: ``(6, D)``.
        to_nodes: ``(N, D)``, in the order in which the nodes were given.
        to_masses: of the ordered nodes, ``(N,)``.
        to_weights: ``(B, D)``.
    """
    features = framed.shape[1]
    total, moment, frame = scratch[0], scratch[1], scratch[2:]
    for graph in graphs:
        for d in range(features):
            total[d], moment[d] = 0.0, begun_moment[graph, d]
        for node in range(ptr[graph], ptr[graph + 1]):
            for d in range(features):
                total[d] += grad_nodes[node, d]
                moment[d] += grad_nodes[node, d] * framed[node, d]
        frame_response(
            graph, kind, scale, share, weights, points, cotangent, total, moment, begun_radius[graph], relative, frame,
            to_weights,
        )  # fmt: skip
        for node in range(ptr[graph], ptr[graph + 1]):
            to_masses[node] = grad_masses[node]
            for d in range(features):
                value = framed[node, d]
                pulled = frame[0, d] + frame[1, d] * value
                to_nodes[order[node], d] = grad_nodes[node, d] / scale[graph, d] + masses[node] * pulled
                to_masses[node] += (frame[2, d] + frame[3, d] * value) * value
