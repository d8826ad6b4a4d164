"""The arrays that a graph needs while it is solved, by name and shape.

Two tables: :data:`CLOUD` for what has all features, from which R is found, and :data:`GRAPH` for everything that is as large as
R says.
"""

from __future__ import annotations

from flowpool.kernels.machine.jit import shared
from flowpool.kernels.machine.lanes import WIDTH
from flowpool.kernels.machine.linear import padded
from flowpool.kernels.machine.memory import PLACE, Table, arranger, doubles, number, opener
from flowpool.kernels.transport import work_rows

BLOCK = 128  # nodes whose moments are taken at once; the weights of a block stay in the first-level cache

# The sizes that shapes are made of.
(
    ONE,
    POINTS,  # M
    NODES,  # N, padded to whole lanes
    FEATURES,  # D
    HULL,  # R, directions that the nodes span
    COORDINATES,  # Q >= R, directions that nodes and points span
    AFFINE,  # Q + 1
    LEAD,  # K <= R, directions of which the Hessian is formed
    COLUMNS,  # 1 + R
    PRODUCTS,  # K (K + 1) / 2
    PAIRS,  # M (M + 1) / 2
    BLOCKS,
    MOMENTS,  # 1 + K + K (K + 1) / 2
    UNKNOWNS,  # M K, at least M
    SQUARE,  # M K + 1, an even number of rows at least
    WIDE,  # M K and one more block, because a block may be stored past the last column
    TWICE,  # 2 M
    LANES,
    WORK,  # rows of the workspace of the transport
    SIZES,
) = range(20)

# Nodes and points with all their features, on the way into coordinates and out of them.
CLOUD = Table(
    "Cloud",
    left=doubles(FEATURES, NODES),  # what is left of the nodes outside the hull so far; then their gradients
    row=doubles(ONE, NODES),
    along=doubles(ONE, NODES),
    points=doubles(POINTS, FEATURES),
    outside=doubles(POINTS, FEATURES),
    spare=doubles(POINTS, FEATURES),
)

# Points and what is known about them.
_PLACE = Table(
    "Place",
    points=doubles(POINTS, COORDINATES),
    gradient=doubles(POINTS, COORDINATES),
    pulled=doubles(POINTS, COORDINATES),  # P Y
    potential=doubles(ONE, POINTS),  # f
    self_potential=doubles(ONE, POINTS),  # h
    rows=doubles(ONE, POINTS),  # P 1
)


# The plan where the Hessian was taken, and how it changes along a direction.
_TANGENT = Table(
    "Tangent",
    conditional=doubles(POINTS, NODES),  # A
    change=doubles(POINTS, NODES),  # dP or dA
    dual=doubles(ONE, NODES),  # dg
    scaled=doubles(POINTS, AFFINE),  # the direction
    sums=doubles(POINTS, LANES),
)


GRAPH = Table(
    "Graph",
    # The nodes and the masses.
    point_masses=doubles(ONE, POINTS),
    masses=doubles(ONE, NODES),
    nodes=doubles(COLUMNS, NODES),  # a row of ones, then the R coordinates
    length=number(NODES),
    count=number(POINTS),
    hull=number(HULL),
    dimension=number(COORDINATES),
    lead=number(LEAD),
    # Where the points are on their way, and vectors of the law of the flow.
    here=_PLACE,
    there=_PLACE,
    velocity=doubles(POINTS, COORDINATES),
    swerve=doubles(POINTS, COORDINATES),
    moved=doubles(POINTS, COORDINATES),  # the last move,
    carried=doubles(ONE, POINTS),  # f as it was expected after it,
    drift=doubles(ONE, POINTS),  # what f did beyond that,
    self_drift=doubles(ONE, POINTS),  # and what h did
    first=doubles(POINTS, COORDINATES),  # k1 of Rosenbrock 2
    newton=doubles(POINTS, COORDINATES),  # the Newton step
    right=doubles(POINTS, COORDINATES),
    solution=doubles(POINTS, COORDINATES),
    # Scratch of linear systems.
    search=doubles(POINTS, COORDINATES),
    image=doubles(POINTS, COORDINATES),
    ready=doubles(POINTS, COORDINATES),
    rest=doubles(POINTS, COORDINATES),
    other=doubles(POINTS, COORDINATES),
    # Scratch of the inner problems.
    scores=doubles(POINTS, NODES),
    work=doubles(WORK, POINTS),  # of flowpool.kernels.transport
    conditional=doubles(POINTS, NODES),  # A
    plan=doubles(POINTS, NODES),  # P
    scaling=doubles(ONE, POINTS),
    old_scaling=doubles(ONE, POINTS),
    shift=doubles(ONE, POINTS),
    step=doubles(ONE, POINTS),
    small_right=doubles(ONE, POINTS),
    rows=doubles(ONE, POINTS),
    old_rows=doubles(ONE, POINTS),
    self_rows=doubles(ONE, POINTS),
    overlap=doubles(POINTS, POINTS),  # P A^T
    small=doubles(POINTS, POINTS),
    inverse=doubles(ONE, POINTS),
    self_gibbs=doubles(POINTS, POINTS),
    self_plan=doubles(POINTS, POINTS),  # Q
    columns=doubles(COORDINATES, POINTS),  # X^T where the gradient is taken
    scaled=doubles(POINTS, AFFINE),
    # The Hessian: what its products need,
    kept_self_plan=doubles(POINTS, POINTS),
    self_change=doubles(POINTS, POINTS),  # dQ
    kept_columns=doubles(COORDINATES, POINTS),  # X^T
    direction_columns=doubles(COORDINATES, POINTS),  # W^T
    own=doubles(ONE, POINTS),  # x_i.w_i
    response=doubles(POINTS, POINTS),
    response_inverse=doubles(ONE, POINTS),
    self_response=doubles(POINTS, POINTS),
    self_response_inverse=doubles(ONE, POINTS),
    tangent=_TANGENT,
    # and its part in the leading coordinates, with two factors of it.
    pairs=doubles(PAIRS, BLOCKS),  # P_ij A_lj
    products=doubles(PRODUCTS, BLOCKS),  # of the first K coordinates of the nodes
    moments=doubles(PAIRS, MOMENTS),
    block_moments=doubles(PAIRS, MOMENTS),
    lead_points=doubles(POINTS, LEAD),
    lead_pulled=doubles(POINTS, LEAD),
    mean=doubles(ONE, LEAD),
    lever=doubles(ONE, LEAD),
    apart=doubles(ONE, LEAD),
    second=doubles(LEAD, LEAD),
    unit=doubles(LEAD, LEAD),
    own_block=doubles(UNKNOWNS, LEAD),
    follow=doubles(TWICE, WIDE),
    weighted_follow=doubles(TWICE, WIDE),
    hessian=doubles(SQUARE, WIDE),
    slide_factor=doubles(SQUARE, WIDE),
    slide_pivots=doubles(ONE, UNKNOWNS),
    newton_factor=doubles(SQUARE, WIDE),
    newton_pivots=doubles(ONE, UNKNOWNS),
    flat_right=doubles(ONE, UNKNOWNS),
    flat_solution=doubles(ONE, UNKNOWNS),
)

arrange_cloud, open_cloud = arranger(CLOUD), opener(CLOUD)
arrange_graph, open_graph = arranger(GRAPH), opener(GRAPH)
CLOUD_PLACES, GRAPH_PLACES = (len(CLOUD.shapes), PLACE), (len(GRAPH.shapes), PLACE)


@shared
def set_cloud_sizes(sizes, count, distinct, features):  # type: ignore[no-untyped-def]
    """Sizes that are known before the hull is."""
    sizes[ONE] = 1
    sizes[POINTS] = count
    sizes[NODES] = padded(distinct)
    sizes[FEATURES] = features


@shared
def set_graph_sizes(sizes, count, length, hull, dimension, lead):  # type: ignore[no-untyped-def]
    """Sizes of everything else."""
    products = lead * (lead + 1) // 2
    sizes[ONE] = 1
    sizes[POINTS] = count
    sizes[NODES] = length
    sizes[HULL] = hull
    sizes[COORDINATES] = dimension
    sizes[AFFINE] = dimension + 1
    sizes[LEAD] = lead
    sizes[COLUMNS] = 1 + hull
    sizes[PRODUCTS] = products
    sizes[PAIRS] = count * (count + 1) // 2
    sizes[BLOCKS] = BLOCK
    sizes[MOMENTS] = 1 + lead + products
    sizes[UNKNOWNS] = count * max(lead, 1)
    sizes[SQUARE] = count * lead + 1
    sizes[WIDE] = padded(count * lead) + padded(lead)
    sizes[TWICE] = 2 * count
    sizes[LANES] = WIDTH
    sizes[WORK] = work_rows(count)
