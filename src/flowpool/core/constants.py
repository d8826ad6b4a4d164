"""The numbers behind the flow and the transports, each with its reason; both engines take them from here.

Times of the flow are in units in which the barycentric map is one step, lengths in units of R, the root of the sum of the
variances of a graph's nodes, and curvatures in units of ``2 a_i``, the Hessian's diagonal for points far apart.
"""

from __future__ import annotations

import math

# The flow (flowpool.core.law)
ERROR = 0.01  # local error of an implicit step, relative to the size of X; 0.02 loses up to 3 % of the minima, 0.003 gains none
ERROR_EXPLICIT = 0.005  # of an explicit one; 0.01 is no faster
FIRST_STEP, SHORTEST, LONGEST_EXPLICIT = 0.1, 0.02, 1.2  # 1.5 loses another minimum of 200; 1.0 gains none
MOST_EXPLICIT = 60  # a flow that still needs short steps then is stiff, and better off with implicit ones
GAMMA = 1 - 1 / math.sqrt(2)  # makes Rosenbrock 2 L-stable
LEAST_STEP, MOST_STEP = 1e-6, 1e9  # of implicit steps
SLOW = 3.0  # implicit step length from which Newton may be tried
NEAR = 0.1  # longest Newton step (rms) that is trusted to stay in the basin; 0.3 costs up to 15 % of the minima
PROGRESS = 0.35  # factor by which a Newton step must reduce the gradient; where points merge it is (2 / 3)^3
TINY, SLIGHT = 1e-3, 1e-8  # length of a Newton step, or what it gains in units of R^2, that cannot leave the basin,
TINY_PROGRESS = 0.9  # and may then go on slowly
AGAIN = (
    0.25  # share of |G| at which a Newton step was refused, up to which the next is tried; twice that after each step
)
UPHILL = 0.2  # slope at the end of a long step, relative to that at its start, at which it has jumped over the minimum
CRAWLING = 1e-3  # speed below which a flow with steps of fixed length is taken to its limit by other steps
SHALLOW = 1e-3  # curvature along a Newton step up to which it leads along a valley
NOISE = 1e-15  # gradient that is rounding error; no step can be judged by it any more

# The divergence for the squared Euclidean cost feels no common move of the points but in their mean, which goes straight to
# that of the nodes. A start whose mean is farther away than this is moved there at once: squares of a large offset would
# drown everything else in rounding.
FARAWAY = 10.0

# What is flat: the one d of the Tikhonov filter h / (h^2 + d^2) of Newton steps, residuals and gradients. Directions
# in which the divergence curves less are left where the flow left them.
FLAT = 1e-4
SINGULAR = FLAT  # curvature up to which a minimiser is said not to be isolated
LEAST_SHIFT = 1e-6  # that keeps the factor of the Hessian definite of which the adjoint makes use
INVERSIONS = 3  # by inverse iteration with the factor
RIDGE = 1e-12  # lambda of section 8.2, in units of the square of the scale: too small to matter to isolated minimisers
LEAST_RIDGE = 1e-16  # and at least this much, or conjugate gradients would follow rounding where H is singular

# Marginal errors of the inner problems: they follow the gradient, or they would freeze the flow.
TIGHTEST = 1e-13  # at the end
LOOSEST_EXPLICIT, LOOSEST = 1e-3, 1e-6  # of explicit steps; later
FIRST_INNER = 1e-12  # at X^(0), where potentials are found from nothing
FURTHER = 5.0  # how far beyond the last move what it has shown of the potentials is trusted; steps grow no faster

# Precision of iterative solutions. An implicit step keeps its order with any matrix, and most first tries of a Newton step
# are refused; neither they nor a length need more than one digit.
TIGHT, ROUGH = 1e-2, 1e-1
MOST_CG = 500  # iterations
MOST_DENSE = 128  # largest M D for which the torch engine has the spectrum of the Hessian while the points move
PRECISE = 1e-11  # first solution of the adjoint
ADJOINT = 1e-10  # its normal equations, in the metric of the model; where that is poor 1e-8 is off by 3e-6
MET = 1e-9  # curvature that keeps the model definite where two points have met
MOST_LEADING = 40  # largest M K for which the Hessian of the K leading directions is formed
FLAT_LEADING = 256  # the same for a gradient where flat directions are to be expected, or for more nodes than
MANY = 2000
LEADING = 0.03  # variance, in units of epsilon, that the nodes may have in all other directions together
OUTSIDE = 5e-4  # distance of the points from the hull, in units of epsilon, that makes the model inexact by as much

# Entropic transport (flowpool.core.sinkhorn)
MAX_ITERATIONS = 500  # of Newton, for each stage of a cold start
SOON = 30  # after which a start at known potentials is given up for a cold one
LOOSE, STAGE, MOST_STAGES = 0.03, 0.3, 64  # a cold start: marginal error of a stage, factor to the next, their number
MISPLACED = 0.3  # and no more of the mass of a point, which a smaller epsilon would be slow to carry to its place
NEARLY = 1e-9  # marginal error from which on Newton ends where it no longer halves it: rounding has the last word
ROUNDING = 2e-14  # marginal error that float64 sums cannot get below
MATCHING = 1e-13  # share of a point's mass below which what it gives to a second node is rounding
PIVOTS = 2**31 - 1  # of exact transport by POT, which gives what it has at its own limit; 5,000 points reach that

# The transport that gives every point the same share (flowpool.step)
BALANCED = 1e-10  # error of the shares in units of 1/M that is enough; the last Newton step squares it
UNBALANCED = 1e-9  # the same, from which a graph is said not to have been solved
HALFWAY = 0.01  # the same, before epsilon is lowered further; with 0.1 few points far away left whole nodes unshared
COOLING = 4.0
WIDE = 30.0  # range of the scores of a node, in units of epsilon, above which epsilon is approached from above
MOST_STEPS = 200
REWEIGHED = 100.0  # sum of the largest changes of a potential, after which a plan is computed afresh and not reweighed
NEXT_TO_NOTHING = 1e-30  # share of a graph below which a point is told to have received nothing
SPREADLESS = 1e-28  # of the square of where it is, below which a variance is not told from that of a single node
DEFINITE = 1e-14  # keeps the Hessian of a plan that leaves no doubt factorisable


def hull_tolerance(resolution: float) -> float:
    """Distance from the hull of the nodes, relative to the farthest, that is rounding.

    Args:
        resolution: relative precision that the nodes were given in.
    """
    return max(1e-10, 10 * resolution)
