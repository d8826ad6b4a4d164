"""When the flow steps how far: the numbers that both engines share.

Times are in units in which the barycentric map is one step, lengths in units of R.
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
