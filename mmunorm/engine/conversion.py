"""Conversion of models of OpenMMLab: the adaptation of their backbones, and their configs and checkpoints."""
from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from mmengine.config import Config
from mmengine.dataset import pseudo_collate
from mmengine.runner.checkpoint import save_checkpoint, weights_to_cpu
from mmpretrain.models.classifiers import BaseClassifier
from torch import Tensor, nn
from torch.utils.data import Dataset

from ..config.presets import REPLACED_TYPE, parse_preset
from ..conversion import AdaptReport, ConversionError, ConversionReport, adapt
from ..conversion.convert import build_target
from ..norms.layers import norm_layers
from ..utils import PreflightError, whole_file, write_text

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


def check_converted(folder: str | os.PathLike, name: str, checkpoint: str) -> None:
    """Raises a PreflightError if :func:`save_converted` would overwrite a file that is not its own."""
    paths = [Path(folder, f'{name}.{suffix}') for suffix in ('pth', 'py')]
    if os.path.realpath(paths[0]) == os.path.realpath(checkpoint):
        raise PreflightError(f'--out {folder}: {paths[0]} is the checkpoint to convert; choose another folder.')
    for path in paths:
        if path.exists() and not path.with_suffix('.md').exists():
            raise PreflightError(f'--out {folder}: {path} is not from a conversion; choose another folder.')


def converted_config(cfg: Config, model: nn.Module, report: ConversionReport, norm_cfg: dict,
                     teacher: str) -> Config:
    """The config of a converted model: its type is `ReplacedNorms`, with a list of the converted norms.

    It is trained by distillation from the checkpoint `teacher` of the LayerNorm model, whose config is `cfg`.
    """
    new = copy.deepcopy(cfg)
    new.pop('pretrained', None)
    imports = new.get('custom_imports') or dict(imports=[], allow_failed_imports=False)
    listed = [imports['imports']] if isinstance(imports['imports'], str) else imports['imports']
    new.custom_imports = {**imports, 'imports': list(dict.fromkeys([*listed, 'mmunorm']))}
    if isinstance(new.model.get('backbone'), dict):
        new.model.backbone.init_cfg = None  # the checkpoint has all weights
    if isinstance(new.model.get('backbone'), dict) or isinstance(model, BaseClassifier):
        new.custom_hooks = [*(new.get('custom_hooks') or []), dict(type='DistillationHook', checkpoint=teacher)]
    converted = {model.get_submodule(norm.norm) for norm in report.converted}
    names = [name for name, module in model.named_modules(remove_duplicate=False) if module in converted]
    new.model.update(type=REPLACED_TYPE, of=new.model.type, norm_cfg=dict(norm_cfg), converted=names)
    return new


def save_converted(model: nn.Module, cfg: Config, report: ConversionReport, folder: str | os.PathLike, name: str,
                   meta: dict | None = None) -> list[Path]:
    """Writes checkpoint, config, and the report as Markdown to `folder`, each file atomically; returns the paths.

    `cfg` is the result of :func:`converted_config`, `name` that of the files without suffix, and `meta` that of the
    original checkpoint, such as its `dataset_meta`. The written config loads the checkpoint.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint, config, table = (folder / f'{name}.{suffix}' for suffix in ('pth', 'py', 'md'))
    cfg = copy.deepcopy(cfg)
    cfg.load_from = str(checkpoint)
    kept = {key: value for key, value in (meta or {}).items() if key == 'dataset_meta'}
    with whole_file(checkpoint) as part:
        save_checkpoint(dict(meta={**kept, 'cfg': cfg.pretty_text}, state_dict=weights_to_cpu(model.state_dict())),
                        str(part))
    write_text(config, cfg.pretty_text)
    write_text(table, report.markdown())
    return [checkpoint, config, table]


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
