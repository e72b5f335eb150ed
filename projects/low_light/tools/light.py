"""Draws images before and after an IAT, with the predicted gamma and colour matrix."""
import argparse
from pathlib import Path

from mmunorm.cli.arguments import add_config_arguments, add_device_argument, command, load_config, out_folder, positive
from mmunorm.cli.images import find_images, read_image
from mmunorm.config.models import load_model
from mmunorm.utils import PreflightError
from projects.low_light.low_light import IAT
from projects.low_light.low_light.figures import Light, light_figure
from projects.paper.paper.layout import save

import numpy as np
import torch


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('config', help='config of an ImageEnhancer, or of an EnhancedModel')
    parser.add_argument('checkpoint', help='checkpoint file')
    parser.add_argument('images', help='an image, or a folder that is searched for images')
    parser.add_argument('--out', required=True, help='output folder of light.png')
    parser.add_argument('--limit', type=positive, default=6, help='maximum number of images (default: 6)')
    add_device_argument(parser)
    add_config_arguments(parser)
    return parser.parse_args(argv)


@torch.no_grad()
def light_of(iat, path, device):
    """The :class:`Light` of an image."""
    image = read_image(path)
    if image is None:
        raise PreflightError(f'{path} cannot be read as an image.')
    before = np.ascontiguousarray(image[..., ::-1])
    x = torch.from_numpy(before).to(device).permute(2, 0, 1)[None] / 255
    gamma, matrix = iat.light(x)
    after = (iat(x)[0] * 255).round().byte().permute(1, 2, 0)
    return Light(path.name, before, after.cpu().numpy(), gamma.item(), matrix[0].cpu().numpy())


@command
def main(argv=None):
    args = parse_args(argv)
    images = find_images(args.images, args.out, args.limit)
    cfg = load_config(args.config, args.cfg_options, args.norm)
    model = load_model(cfg, args.checkpoint).to(args.device)
    iat = next((module for module in model.modules() if isinstance(module, IAT)), None)
    if iat is None:
        raise PreflightError(f'{args.config} has no IAT: its model is a {type(model).__name__}.')
    out = out_folder(args.out)
    save(light_figure([light_of(iat, Path(path), args.device) for path, _ in images]), out / 'light.png')
    print(f'{out / "light.png"} shows {len(images)} images.')


if __name__ == '__main__':
    main()
