"""When the flow steps how far, and when a balance is reached: the numbers that torch and compiled code share.

Times of the flow are in units in which the barycentric map is one step, lengths in units of R.
"""

from __future__ import annotations

import math

ERROR = 0.01  # local error of a step, relative to the size of X
FIRST_STEP, SHORTEST, LONGEST_EXPLICIT = 0.1, 0.02, 0.6  # 0.6 is the stability limit of Adams-Bashforth 2
MOST_EXPLICIT = 60  # a flow that still needs short steps then is stiff, and better off with implicit ones
GAMMA = 1 - 1 / math.sqrt(2)  # makes Rosenbrock 2 L-stable
SLOW = 3.0  # implicit step length from which Newton may be tried
NEAR = 0.1  # longest Newton step (rms) that is trusted to stay in the basin
PROGRESS = 0.3  # factor by which a Newton step must reduce the gradient
TINY, TINY_PROGRESS = 1e-3, 0.9  # a step too short to leave the basin may go on slowly, as it does at merging points
TIGHTEST = 1e-13  # marginal error of the inner problems at the end

# Precision of iterative solutions. An implicit step keeps its order with any matrix, and most first tries of a Newton step
# are refused; neither they nor a length need more than one digit.
TIGHT, ROUGH = 1e-2, 1e-1
MOST_LEADING = 64  # largest M K for which the Hessian of the K leading directions is formed without need
LEADING = 0.03  # variance, in units of epsilon, that the nodes may have in all other directions together

# Of the transport that gives every point the same share (flowpool.step.balance)
BALANCED = 1e-10  # error of the shares in units of 1/M that is enough; the last Newton step squares it
HALFWAY = 0.1  # the same, before epsilon is lowered further
COOLING = 4.0
WIDE = 30.0  # range of the scores of a node, in units of epsilon, above which epsilon is approached from above
MOST_STEPS = 200
ROUNDING = 1e-14  # keeps the Hessian of a plan that leaves no doubt factorisable
