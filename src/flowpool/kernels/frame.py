"""The frame of a graph, the way into it and the way out.

:mod:`flowpool.core.frame` is the specification, for the squared Euclidean cost of weighted features: a node x of a graph with
mean m becomes ``y = w (x - m) / U``, where U makes the variances of the y sum to one. All features weigh ``w = 1`` in the plain
cost. Sums go over the nodes in the order of their features, which does not depend on how they were given.
"""

from __future__ import annotations

import math

from flowpool.core.constants import FARAWAY
from flowpool.kernels.machine.jit import kernel, shared
from flowpool.kernels.machine.linear import padded
from flowpool.kernels.machine.rows import stay_apart
from flowpool.kernels.records import BROKEN, CLOUD, DIMENSION, EMPTY, KIND, RADIUS, SINGLE, UNIT
from flowpool.status import Status

POINTLESS = 1e-13  # spread of a cloud, relative to its largest entry, below which it is one point

OK, NOTHING, NONFINITE_INPUT = Status.OK.value, Status.EMPTY.value, Status.NONFINITE_INPUT.value
IS_SINGULAR, NONFINITE = Status.SINGULAR.value, Status.NONFINITE.value


@kernel
def sort_stable(order, spare, keys, size):  # type: ignore[no-untyped-def]
    """Sorts the first ``size`` entries of ``order`` by their keys, by merging; equal keys keep their order."""
    stay_apart()
    width = 1
    while width < size:
        for begin in range(0, size, 2 * width):
            middle, end = min(begin + width, size), min(begin + 2 * width, size)
            left, right = begin, middle
            for place in range(begin, end):
                if left < middle and (right >= end or not keys[order[right]] < keys[order[left]]):
                    spare[place] = order[left]
                    left += 1
                else:
                    spare[place] = order[right]
                    right += 1
        for place in range(size):
            order[place] = spare[place]
        width *= 2


@kernel
def arrange(given, kept, which, room):  # type: ignore[no-untyped-def]
    """Places the nodes of a graph in the order of their features along a direction, with masses that sum to one."""
    stay_apart()
    first, size = given.ptr[which], given.ptr[which + 1] - given.ptr[which]
    ranks, keys = room.ranks, room.keys
    for k in range(size):
        keys[k], ranks[k] = 0.0, k
        for d in range(given.nodes.shape[1]):
            # Any fixed direction tells different nodes apart.
            keys[k] += given.nodes[given.order[first + k], d] * room.direction[d]
    sort_stable(ranks, room.spare, keys, size)
    whole = 0.0
    for k in range(size):
        node = given.order[first + ranks[k]]
        kept.order[first + k] = node
        kept.masses[first + k] = given.masses[node] if len(given.masses) > 0 else 1.0
        whole += kept.masses[first + k]
    for k in range(size):
        kept.masses[first + k] /= whole


@kernel
def find_frame(given, kept, which):  # type: ignore[no-untyped-def]
    """Fills mean, scale and shares of a graph, R, U and what kind it is."""
    stay_apart()
    nodes, order, masses, weights = given.nodes, kept.order, kept.masses, given.weights
    features, first, last = nodes.shape[1], given.ptr[which], given.ptr[which + 1]
    mean, scale, share, facts = kept.frame[which, 0], kept.frame[which, 1], kept.frame[which, 2], kept.facts[which]
    for d in range(features):
        mean[d], scale[d], share[d] = 0.0, 1.0, 0.0
    facts[RADIUS] = facts[UNIT] = 1.0
    facts[KIND] = EMPTY
    if first == last:
        return
    largest, finite, heavy = 0.0, True, 0
    for place in range(first, last):
        heavy += masses[place] > 0.0
        for d in range(features):
            value = nodes[order[place], d]
            finite = finite and math.isfinite(value)
            mean[d] += masses[place] * value
            if masses[place] > 0.0:
                largest = max(largest, abs(value))
    if not finite:
        for d in range(features):
            mean[d] = 0.0
        facts[KIND] = BROKEN
        return
    # Squares of the features themselves could overflow.
    spread, weighted_spread = 0.0, 0.0
    for place in range(first, last):
        if masses[place] > 0.0:
            for d in range(features):
                apart = abs(nodes[order[place], d] - mean[d])
                spread = max(spread, apart)
                weighted_spread = max(weighted_spread, apart * weights[d])
    radius = spread if spread > 0.0 else 1.0
    unit = weighted_spread if weighted_spread > 0.0 else 1.0
    variance = 0.0
    for place in range(first, last):
        if masses[place] > 0.0:  # the square of another could overflow
            for d in range(features):
                apart = nodes[order[place], d] - mean[d]
                part = apart / radius
                variance += masses[place] * (part * part)
                part = apart * weights[d] / unit
                share[d] += masses[place] * (part * part)
    weighted_variance = 0.0
    for d in range(features):
        weighted_variance += share[d]
    facts[KIND] = SINGLE
    if heavy > 1 and spread > POINTLESS * largest and variance > 0.0 and weighted_variance > 0.0:
        facts[KIND] = CLOUD
        radius *= math.sqrt(variance)
        unit *= math.sqrt(weighted_variance)
        for d in range(features):
            share[d] /= weighted_variance
    facts[RADIUS], facts[UNIT] = radius, unit
    for d in range(features):
        scale[d] = unit / weights[d]


@shared
def framed_epsilon(given, kept, which):  # type: ignore[no-untyped-def]
    """Epsilon in the frame of a graph."""
    unit = kept.facts[which, UNIT]
    return given.epsilon[which] if given.relative else given.epsilon[which] / (unit * unit)


@kernel
def place_start(given, kept, which, start):  # type: ignore[no-untyped-def]
    """Fills X^(0) in the frame, rows ``(M, D)``, from units of R around the mean if it is relative.

    A start that is far away is moved to the nodes (:data:`~flowpool.core.constants.FARAWAY`).
    """
    stay_apart()
    reference, shares, features = given.reference, given.point_masses, given.reference.shape[1]
    mean, scale, radius = kept.frame[which, 0], kept.frame[which, 1], kept.facts[which, RADIUS]
    away = 0.0
    for d in range(padded(features)):
        middle = 0.0
        for i in range(len(shares)):
            value = 0.0
            if d < features:
                value = radius * reference[i, d] if given.relative else reference[i, d] - mean[d]
                value /= scale[d]
                middle += shares[i] * value
            start[i, d] = value
        away += middle * middle
    if away > FARAWAY * FARAWAY:
        for d in range(features):
            middle = 0.0
            for i in range(len(shares)):
                middle += shares[i] * start[i, d]
            for i in range(len(shares)):
                start[i, d] -= middle


@shared
def end_along(kept, which, basis, i, d):  # type: ignore[no-untyped-def]
    """Feature d of the point i of X* in the frame, given the rows of the basis."""
    value = 0.0
    for e in range(int(kept.facts[which, DIMENSION])):
        value += kept.ends[which, i, e] * basis[e, d]
    return value


@kernel
def hand_out(kept, which, basis, singular, found):  # type: ignore[no-untyped-def]
    """Fills X* outside the frame, and the status and the residual as the caller knows them.

    A graph that is one point is pooled to copies of it, an empty one to zeros: both sit at their frame's origin.
    """
    stay_apart()
    points, residual, status = found.points, found.residual, found.status
    mean, scale, kind = kept.frame[which, 0], kept.frame[which, 1], kept.facts[which, KIND]
    finite = True
    for i in range(points.shape[1]):
        for d in range(points.shape[2]):
            inside = end_along(kept, which, basis, i, d) if kind == CLOUD else 0.0
            value = math.nan if kind == BROKEN else mean[d] + scale[d] * inside
            points[which, i, d] = value
            finite = finite and math.isfinite(value)
    if status[which] == NONFINITE or kind == BROKEN:
        residual[which] = math.nan
    if kind == BROKEN:
        status[which] = NONFINITE_INPUT
    elif math.isnan(residual[which]) or not finite:
        status[which] = NONFINITE
    elif kind == EMPTY:
        status[which] = NOTHING
    elif status[which] == OK and singular:
        status[which] = IS_SINGULAR


@kernel
def frame_response(given, kept, which, points, cotangent, room, to_radius, gradients):  # type: ignore[no-untyped-def]
    """How the frame of a graph answers to gradients: what is added to those that its nodes have in the frame.

    Fills the rows of ``room.push``, ``(4, D)``: the gradient in a node of mass b, in the frame y, is
    ``grad y / scale + b (push_0 + push_1 y)``, and that in its mass ``grad b + push_2 . y + push_3 . y^2``.

    Args:
        points: X* in the frame, rows ``(M, D)``.
        cotangent: gradient in X* outside, ``(B, M, D)``.
        room: with the sums over the nodes, and over points that depend on the frame as they do, of ``grad y`` (``total``) and
            of ``y grad y`` (``moment``).
        to_radius: gradient in R, in units of 1/R; a relative start depends on it.
    """
    stay_apart()
    # If nothing is relative, mean and unit are constants, but for the mean of a graph that is one point.
    follows = given.relative or kept.facts[which, KIND] != CLOUD
    scale, share, weights, push = kept.frame[which, 1], kept.frame[which, 2], given.weights, room.push
    to_weights, to_unit = gradients.weights, 0.0
    for d in range(len(weights)):
        outer, inner = 0.0, 0.0
        for i in range(cotangent.shape[1]):
            outer += cotangent[which, i, d]
            inner += cotangent[which, i, d] * points[i, d]
        to_scale = inner - room.moment[d] / scale[d]
        push[0, d] = outer - room.total[d] / scale[d] if follows else 0.0
        push[2, d] = push[0, d] * scale[d]
        to_unit += to_scale / weights[d]
        to_weights[which, d] = -to_scale * scale[d] / weights[d]
    if not given.relative or kept.facts[which, KIND] != CLOUD:
        to_unit = 0.0
    for d in range(len(weights)):
        push[1, d] = to_unit * weights[d] + to_radius * scale[d]
        push[3, d] = 0.5 * push[1, d] * scale[d]
        to_weights[which, d] += to_unit * scale[d] * share[d]


@kernel
def leave_frame(given, kept, which, points, pull, to_share, cotangent, room, to_radius, gradients):  # type: ignore[no-untyped-def]
    """Writes the gradients of a graph in what was given.

    Args:
        points: X* in the frame, rows ``(M, D)``.
        pull, to_share: gradients in the frame for each distinct node: in y, for a mass of one, ``(D, N)``, and in its mass,
            ``(1, N)``.
        cotangent: gradient in X* outside, ``(B, M, D)``.
        room: with ``moment``, what flat directions, along which nothing moves the points, add to that of :func:`frame_response`.
        to_radius: their gradient in R.
    """
    stay_apart()
    nodes, order, distinct, masses = given.nodes, kept.order, kept.distinct, kept.masses
    features, first, last = nodes.shape[1], given.ptr[which], given.ptr[which + 1]
    mean, scale, push, cloud = kept.frame[which, 0], kept.frame[which, 1], room.push, kept.facts[which, KIND] == CLOUD
    for d in range(features):
        room.total[d] = 0.0
        for place in range(first, last):
            if cloud:
                value = masses[place] * pull[d, distinct[place]]
                room.total[d] += value
                room.moment[d] += value * ((nodes[order[place], d] - mean[d]) / scale[d])
    frame_response(given, kept, which, points, cotangent, room, to_radius, gradients)
    average = 0.0
    for place in range(first, last):
        node = order[place]
        to_mass = to_share[0, distinct[place]] if cloud else 0.0
        for d in range(features):
            inside = (nodes[node, d] - mean[d]) / scale[d]
            own = pull[d, distinct[place]] / scale[d] if cloud else 0.0
            gradients.nodes[node, d] = masses[place] * (own + push[0, d] + push[1, d] * inside)
            to_mass += (push[2, d] + push[3, d] * inside) * inside
        gradients.masses[node] = to_mass
        average += masses[place] * to_mass
    if len(given.masses) > 0:  # they were divided by their sum
        whole = 0.0
        for place in range(first, last):
            whole += given.masses[order[place]]
        for place in range(first, last):
            gradients.masses[order[place]] = (gradients.masses[order[place]] - average) / whole
