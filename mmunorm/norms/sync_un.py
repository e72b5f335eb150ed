"""UN over the tokens of several processes."""
from __future__ import annotations

from ..registry import MODELS
from .sync import Ranks
from .un import UN


@MODELS.register_module()
class SyncUN(UN):
    """:class:`UN` with statistics and an outlier decision over the tokens of all processes together.

    Processes may have different numbers of tokens, or none. Outside of a distributed run and in `eval()` it is UN.
    Every process has to run the same norms in the same order, forward and backward. Checkpoints
    are UN's. `convert_sync` and `revert_sync` do the same for a model of any offline norms.
    """
    ranks = Ranks()
