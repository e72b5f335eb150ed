"""Layouts of published checkpoints: renames weights of other projects to the names of mmpretrain's models."""
from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

# Keys of the weights that a project evaluates, by precedence: DeiT, the official Swin; timm and the official
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

_of_projects = []


def published_layout(read: Callable[[dict[str, Tensor], nn.Module], dict[str, Tensor] | None]) -> Callable:
    """Decorates a function that returns the weights of a published file under a model's own names.

    It returns None for files and models that it does not know. The projects' layouts come before those of this module.
    """
    _of_projects.append(read)
    return read


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


def weights_for(model: nn.Module, content: dict) -> dict[str, Tensor]:
    """The weights in the content of a checkpoint under the names of `model`, if they are of a project that this module
    knows.

    These are the official Swin's, DeiT's and T2T-ViT's and timm's, for mmpretrain's classifiers, and those of
    :func:`published_layout`. Others keep their names; see docs/checkpoints.md. The model's relative position indices
    are added, which timm's files lack.
    """
    weights = find_weights(content)
    for read in _of_projects:
        if named := read(weights, model):
            return named
    if 'tokens_to_token.project.weight' in weights:
        return rename(weights, *_T2T)
    if 'patch_embed.proj.weight' not in weights:
        return weights
    expected = model.state_dict()  # not earlier: FSDP would wait for the other processes
    if 'patch_embed.proj.weight' in expected:  # mmpretrain's TimmClassifier has timm's names itself
        return weights
    if 'layers.0.blocks.0.norm1.weight' not in weights:
        return rename(weights, *_VIT)
    indices = {name: value for name, value in expected.items() if name.endswith('relative_position_index')}
    return {**_from_swin(weights), **indices}


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
