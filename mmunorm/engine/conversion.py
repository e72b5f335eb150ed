"""Conversion of models of OpenMMLab: the norm that they get, and the adaptation of their backbones."""
from __future__ import annotations

from collections.abc import Sequence

import torch
from mmengine.dataset import pseudo_collate
from torch import Tensor, nn
from torch.utils.data import Dataset

from ..config.presets import parse_preset
from ..conversion import AdaptReport, ConversionError, adapt
from ..conversion.convert import build_target
from ..norms.layers import norm_layers
from ..utils import PreflightError

RATE = 1e-3  # of the adaptation


def parse_goal(text: str) -> tuple[str, dict]:
    """The name and the config of the norm given by `--to`. It keeps the statistics of the conversion images.

    A PreflightError if the norm is unknown, or a LayerNorm cannot be converted to it.
    """
    name, norm_cfg = parse_preset(text)
    if norm_cfg.get('centered') is True:
        norm_cfg['centered'] = 'frozen'
    try:
        build_target(norm_cfg, nn.LayerNorm(1), nn.Module())
    except KeyError:
        raise PreflightError(f'--to {text}: there is no norm of type {norm_cfg["type"]!r}.') from None
    except ConversionError as error:
        raise PreflightError(f'--to {text}: {error}.') from error
    return name, norm_cfg


def backbone_of(model: nn.Module) -> nn.Module | None:
    """The part of an OpenMMLab model that is adapted: the backbone, or else the child with all norms, if not frozen.

    The latter is the model of timm or transformers in a classifier of mmpretrain around it.
    """
    norms = {norm for _, norm in norm_layers(model)}
    parts = [model.backbone] if hasattr(model, 'backbone') else [
        child for child in model.children() if norms <= set(child.modules())]
    return next((part for part in parts if any(weight.requires_grad for weight in part.parameters())), None)


class _Inputs(Dataset):
    """Preprocessed images `(3, H, W)`, the inputs of a backbone."""

    def __init__(self, samples: Sequence[dict], preprocessor: nn.Module):
        self.samples, self.preprocessor = samples, preprocessor

    def __len__(self) -> int:
        return len(self.samples)

    @torch.no_grad()
    def __getitem__(self, index: int) -> Tensor:
        return self.preprocessor(pseudo_collate([self.samples[index]]), False)['inputs'][0]


def adapt_backbone(model: nn.Module, teacher: nn.Module, samples: Sequence[dict], steps: int,
                   batch_size: int) -> AdaptReport:
    """Trains a converted backbone, in place, to reproduce its outputs with LayerNorm, a third of the steps block by
    block.

    `model` must have a :func:`backbone_of`; `teacher` is the backbone with LayerNorm, and `samples` are single images
    as of `FolderImages` or `samples_of`.
    """
    return adapt(backbone_of(model), teacher, _Inputs(samples, model.data_preprocessor), steps - steps // 3,
                 block_steps=steps // 3, batch_size=batch_size, lr=RATE, block_lr=RATE, progress=True)
