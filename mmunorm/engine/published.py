"""Published checkpoints of other projects, in a run."""
from __future__ import annotations

from mmengine.hooks import Hook

from ..checkpoints.layouts import in_mmpretrain_names
from .runner import unwrapped_model


class PublishedNamesHook(Hook):
    """Gives a checkpoint of another project the names of mmpretrain's models, before a run loads it."""

    def after_load_checkpoint(self, runner, checkpoint: dict) -> None:
        weights = in_mmpretrain_names(checkpoint, unwrapped_model(runner))
        if weights is not None:
            checkpoint['state_dict'] = weights
