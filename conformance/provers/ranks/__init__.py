"""Properties of several ranks on a pool of gloo processes that is started once.

    ::

        with RankPool("your_package", world_size_max=4) as pool:
            results = pool.run(function, 4, argument)  # function(rank: Rank, argument), on ranks 0 to 3

A rank that dies is reported, not waited for; what a rank raises is raised here, with its number.
"""

from conformance.provers.ranks.errors import RankDied, RankError, RankTimeout
from conformance.provers.ranks.pool import Rank, RankPool

__all__ = ["Rank", "RankDied", "RankError", "RankPool", "RankTimeout"]
