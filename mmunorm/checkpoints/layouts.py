"""Layouts of published checkpoints: renames weights of other projects to the names of mmpretrain's models."""
from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from ..utils import PreflightError

# Keys of the weights that a project evaluates, by precedence: DeiT, the official Swin and SLAB; timm and the official
# T2T-ViT; OpenMMLab, whose `state_dict` has the averaged weights if there are any.
_WEIGHTS = ('model', 'state_dict_ema', 'state_dict')

# Of one layer, whichever the model.
_PARTS = (('.mlp.fc1.', '.ffn.layers.0.0.'), ('.mlp.fc2.', '.ffn.layers.1.'),
          ('.mlp.0.', '.ffn.layers.0.0.'), ('.mlp.2.', '.ffn.layers.1.'))
_VIT_PARTS = (*_PARTS, ('.norm1.', '.ln1.'), ('.norm2.', '.ln2.'), ('patch_embed.proj.', 'patch_embed.projection.'))

# Prefixes and parts, as `rename` takes them.
_SWIN = ((('layers.', 'backbone.stages.'), ('norm.', 'backbone.norm{last}.'), ('head.fc.', 'head.fc.'),
          ('head.', 'head.fc.'), ('', 'backbone.')),
         (*_PARTS, ('.attn.', '.attn.w_msa.'), ('patch_embed.proj.', 'patch_embed.projection.')))
_VIT = ((('blocks.', 'backbone.layers.'), ('norm.', 'backbone.ln1.'), ('head.', 'head.layers.head.'),
         ('head_dist.', 'head.layers.head_dist.'), ('', 'backbone.')), _VIT_PARTS)
_T2T = ((('blocks.', 'backbone.encoder.'), ('head.', 'head.layers.head.'), ('', 'backbone.')),
        (*_VIT_PARTS, *((f'{layer}.{part}', f'{layer}.attn.{part}') for layer in ('attention1', 'attention2')
                        for part in ('kqv.', 'proj.', 'w'))))

# SLAB's norm. LayerNorm (`norm1`) and the counters in a LinearNorm are used only in training.
_SLAB_NORM = re.compile(r'(.*?norm\d?)\.(?:norm2\.)?(?:bn\.(.*)|(alpha))')
_SLAB_TRAINING = re.compile(r'.*norm\d?\.(norm1\.(weight|bias)|warm|iter|total_step)')

_of_projects = []


def published_layout(read: Callable[[dict[str, Tensor], nn.Module], dict[str, Tensor] | None]) -> Callable:
    """Decorates a function that returns the weights of a published file under a model's own names.

    It returns None for files and models that it does not know. The projects' layouts come before those of this module.
    """
    _of_projects.append(read)
    return read


def in_one_layout(content):
    """The content of a checkpoint file, with only the weights that the project evaluates as its `state_dict`.

    So all readers load the same weights, including mmengine's Runner and `init_cfg`. Files that contain only weights,
    or no checkpoint, are unchanged.
    """
    if not isinstance(content, dict):
        return content
    held = [key for key in _WEIGHTS if _is_weights(content.get(key))]
    weights = find_weights(content)
    if not held:
        return weights
    return {**{key: value for key, value in content.items() if key not in held}, 'state_dict': weights}


@contextmanager
def computed_tables(model: nn.Module) -> Iterator[None]:
    """A context in which loading may lack tables that attention computes: mmpretrain's SwinV2 drops those of a file."""
    computed = '.relative_position_index', '.relative_coords_table'

    def forgive(module: nn.Module, keys) -> None:
        keys.missing_keys[:] = [name for name in keys.missing_keys if not name.endswith(computed)]

    handle = model.register_load_state_dict_post_hook(forgive)
    try:
        yield
    finally:
        handle.remove()


def find_weights(content: dict) -> dict[str, Tensor]:
    """The weights in a checkpoint's content, without the copies of mmcv's EMAHook and without wrapper prefixes.

    The prefixes are `module.` of DataParallel and `_orig_mod.` of torch.compile.
    """
    weights = next((content[key] for key in _WEIGHTS if _is_weights(content.get(key))), content)
    if not _is_weights(weights):
        return weights
    named = type(weights)((name.replace('_orig_mod.', '').removeprefix('module.'), value)
                          for name, value in weights.items() if not name.startswith('ema_'))
    if hasattr(weights, '_metadata'):
        named._metadata = weights._metadata
    return named


def _is_weights(value) -> bool:
    return (isinstance(value, dict) and any(isinstance(tensor, Tensor) for tensor in value.values())
            and all(isinstance(name, str) for name in value))


def in_mmpretrain_names(content: dict, model: nn.Module) -> dict[str, Tensor] | None:
    """The weights of a checkpoint of another project under the names of mmpretrain's classifier or a project's model.

    These are the official Swin's and T2T-ViT's, timm's and DeiT's, and SLAB's Swin and DeiT, whose norms become
    RepBN: `alpha` is its `eta`; and those of :func:`published_layout`. See docs/checkpoints.md.

    Args:
        content (dict): content of the file.
        model (nn.Module): the model to load into. Its relative position indices are added, which timm's files lack.

    Returns:
        dict[str, Tensor] | None: None if the names are of no such project.

    Raises:
        PreflightError: SLAB's model is not supported, or `model` has other norms.
    """
    weights = find_weights(content)
    for read in _of_projects:
        if named := read(weights, model):
            return named
    is_slab = any(name.endswith('.alpha') and name.replace('.alpha', '.bn.running_var') in weights for name in weights)
    if is_slab:
        weights = _from_slab(weights)
    if 'tokens_to_token.project.weight' in weights:
        return rename(weights, *_T2T)
    if 'patch_embed.proj.weight' not in weights:
        return None
    expected = model.state_dict()  # not earlier: FSDP would wait for the other processes
    if 'patch_embed.proj.weight' in expected:  # mmpretrain's TimmClassifier has timm's names itself
        return None
    if is_slab and not any(name.endswith('.eta') for name in expected):
        raise PreflightError("the checkpoint is from SLAB, whose norms are RepBN: add --norm RepBN.")
    if 'layers.0.blocks.0.norm1.weight' not in weights:
        return rename(weights, *_VIT)
    indices = {name: value for name, value in expected.items() if name.endswith('relative_position_index')}
    return {**_from_swin(weights), **indices}


def _from_slab(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Renames norms to RepBN's names; see https://github.com/xinghaochen/SLAB, classification/models/prepbn.py."""
    if 'patch_embed.proj.weight' not in weights or any('.attn.dwc.' in name for name in weights):
        raise PreflightError("SLAB's PVT, CSWin and models with linear attention (slab_*.pth) are not supported, only "
                             'its Swin and DeiT with PRepBN.')
    named = {}
    for name, value in weights.items():
        if not _SLAB_TRAINING.fullmatch(name):
            norm = _SLAB_NORM.fullmatch(name)
            named[f'{norm[1]}.{norm[2] or "eta"}' if norm else name] = value
    return named


def _from_swin(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """From the official Swin or timm: mmpretrain's patch merging has another order of input channels."""
    last = max(int(name.split('.')[1]) for name in weights if name.startswith('layers.'))
    if f'layers.{last}.downsample.norm.weight' in weights:  # timm's merging is before the stage, not after it
        weights = {re.sub(r'^layers\.(\d+)\.downsample', lambda m: f'layers.{int(m[1]) - 1}.downsample', name): value
                   for name, value in weights.items()}
    weights = {name: _merged(value) if '.downsample.' in name and value.numel() > 1 else value
               for name, value in weights.items() if not name.endswith('.attn_mask')}
    prefixes, parts = _SWIN
    return rename(weights, [(old, new.format(last=last)) for old, new in prefixes], parts)


def _merged(value: Tensor) -> Tensor:
    """Reorders the `(..., 4 C)` inputs of a merging from token-major to channel-major."""
    return value.unflatten(-1, (4, -1))[..., [0, 2, 1, 3], :].transpose(-1, -2).flatten(-2)


def rename(weights: dict[str, Tensor], prefixes, parts) -> dict[str, Tensor]:
    """Weights whose first fitting prefix is replaced, then each part: pairs of old and new."""
    def renamed(name: str) -> str:
        old, new = next((old, new) for old, new in prefixes if name.startswith(old))
        name = new + name.removeprefix(old)
        for old, new in parts:
            name = name.replace(old, new)
        return name

    return {renamed(name): value for name, value in weights.items()}
