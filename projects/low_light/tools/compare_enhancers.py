"""PSNR of an enhancer's images, such as those of a converted one, against those of another enhancer."""
import argparse
from pathlib import Path

from mmunorm.cli.arguments import add_device_argument, command, load_config
from mmunorm.cli.images import read_image
from mmunorm.config.models import load_model
from mmunorm.utils import IMAGE_SUFFIXES, PreflightError
from projects.low_light.low_light import ImageEnhancer

import torch


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--original', nargs=2, required=True, metavar=('CONFIG', 'CHECKPOINT'))
    parser.add_argument('--other', nargs=2, required=True, metavar=('CONFIG', 'CHECKPOINT'))
    parser.add_argument('images', help='a folder that is searched for images')
    add_device_argument(parser)
    return parser.parse_args(argv)


def load_enhancer(config, checkpoint, device):
    model = load_model(load_config(config), checkpoint).to(device)
    if not isinstance(model, ImageEnhancer):
        raise PreflightError(f'{config} has no ImageEnhancer: its model is a {type(model).__name__}.')
    return model.eval()


@torch.no_grad()
def psnr(models, path, device):
    """Of the second model's float image against the first's."""
    image = read_image(path)
    if image is None:
        raise PreflightError(f'{path} cannot be read as an image.')
    x = torch.from_numpy(image[..., ::-1].copy()).to(device).permute(2, 0, 1) / 255
    original, other = (model([x])[0] for model in models)
    return -10 * (original - other).square().mean().clamp(min=1e-12).log10().item()


@command
def main(argv=None):
    args = parse_args(argv)
    models = [load_enhancer(*files, args.device) for files in (args.original, args.other)]
    paths = sorted(path for path in Path(args.images).rglob('*') if path.suffix.lower() in IMAGE_SUFFIXES)
    if not paths:
        raise PreflightError(f'there is no image in {args.images}.')
    found = {path: psnr(models, path, args.device) for path in paths}
    worst = min(found, key=found.get)
    print(f'{len(found)} images: PSNR {sum(found.values()) / len(found):.1f} dB, worst {found[worst]:.1f} dB, {worst}')


if __name__ == '__main__':
    main()
