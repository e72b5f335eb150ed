"""Converts networks that IAT's authors released to UN, without labels, and measures the PSNR to the original.

    python projects/photographs/tools/make_crops.py
    python projects/low_light/tools/convert_released.py best_Epoch_lol.pth best_Epoch_lol_v1.pth best_Epoch_exposure.pth

The crops are resized and darkened, as by make_dark.py. Norms are calibrated and adapted on those of `train`, with two
fifths of `--steps` block by block, then `--steps` end to end; PSNR is that of `test`. Only the global branch has
LayerNorms, so it is converted and adapted alone.
"""
import argparse
import copy
from pathlib import Path

from mmunorm import adapt, convert_norms
from mmunorm.checkpoints.loading import load_weights
from mmunorm.cli.arguments import command, out_folder, positive
from mmunorm.tables import markdown_table
from mmunorm.utils import IMAGE_SUFFIXES, PreflightError
from projects.low_light.low_light import IAT
from projects.low_light.low_light.darkness import darken

import numpy as np
import torch
from PIL import Image


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('checkpoints', nargs='+', type=Path)
    parser.add_argument('--crops', type=Path, default=Path('data/crops'), help='folder with train and test')
    parser.add_argument('--size', type=positive, default=128, help='side of an image in pixels')
    parser.add_argument('--train', type=positive, default=2000, help='crops to train on; every eighth for statistics')
    parser.add_argument('--test', type=positive, default=128, help='crops to measure on')
    parser.add_argument('--steps', type=int, default=500, help='end to end; 0 does not adapt')
    parser.add_argument('--keep', choices=['norm1', 'norm2'], help='a LayerNorm that stays')
    parser.add_argument('--out', default='work_dirs/iat_released', help='folder of the converted weights')
    return parser.parse_args(argv)


def dark_crops(folder, number, size, seed):
    """Crops spread over a folder, darkened: RGB `(N, 3, size, size)` in [0, 1]."""
    paths = sorted(path for path in folder.glob('*') if path.suffix.lower() in IMAGE_SUFFIXES)
    if not paths:
        raise PreflightError(f'--crops: there is no image in {folder}.')
    rng, found = np.random.default_rng(seed), []
    for index in np.linspace(0, len(paths) - 1, min(number, len(paths))).astype(int):
        image = Image.open(paths[index]).convert('RGB').resize((size, size), Image.Resampling.BOX)
        found.append(torch.from_numpy(darken(np.asarray(image), rng)))
    return torch.stack(found).permute(0, 3, 1, 2).float() / 255


@torch.no_grad()
def psnr(model, teacher, images):
    """Of each image, in dB."""
    errors = torch.cat([(model(x) - teacher(x)).square().mean((1, 2, 3)) for x in images.split(16)])
    return -10 * errors.clamp(min=1e-12).log10()


@command
def main(argv=None):
    args = parse_args(argv)
    out = out_folder(args.out)
    train, test = (dark_crops(args.crops / split, number, args.size, seed)
                   for seed, (split, number) in enumerate((('train', args.train), ('test', args.test))))
    rows = []

    def measure(path, stage):
        found = psnr(model, teacher, test)
        rows.append([path.name, stage, *(f'{value:.1f}' for value in (found.mean(), found.quantile(0.1), found.min()))])
        print(' | '.join(rows[-1]), flush=True)

    for path in args.checkpoints:
        teacher = IAT(norm_cfg=dict(type='LN')).eval()
        load_weights(teacher, str(path))
        model = copy.deepcopy(teacher)
        ours, theirs = model.global_branch, teacher.global_branch
        convert_norms(ours, train[::8].split(50), keep=[args.keep] if args.keep else [])
        measure(path, 'converted')
        if args.steps:
            adapt(ours, theirs, train, args.steps, block_steps=args.steps * 2 // 5, lr=1e-3, block_lr=1e-3,
                  progress=True)
            measure(path, 'and adapted')
        torch.save(dict(state_dict=model.state_dict()), out / f'{path.stem}_un.pth')
    print(*markdown_table(['weights', 'way', 'PSNR, mean', '10th percentile', 'worst image'], rows), sep='\n')


if __name__ == '__main__':
    main()
