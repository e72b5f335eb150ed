"""Computes linear CKA between all norm, attention and feed-forward outputs of two models on the same images
(Fig. 6). Writes a heat map, the diagonal as a line, cka.csv and cka.json. The images are CONFIG_A's test data."""
import argparse
import json
from itertools import islice

from mmunorm.checkpoints.loading import check_checkpoint
from mmunorm.cli.arguments import add_config_arguments, add_device_argument, command, load_config, out_folder
from mmunorm.cli.data_checks import check_data
from mmunorm.config.models import load_model
from mmunorm.fusion import allow_partial_calls
from mmunorm.utils import PreflightError, write_text
from projects.paper.paper.cka import branch_layers, compare_models
from projects.paper.paper.figures import cka_diagonal_figure, cka_figure
from projects.paper.paper.layout import save
from projects.paper.paper.measures import write_csv
from projects.paper.paper.work_dirs import distinct_names

import numpy as np
from mmengine.registry import init_default_scope
from mmengine.runner import Runner
from tqdm import tqdm


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('config_a', help='config file of the first model')
    parser.add_argument('checkpoint_a', help='its checkpoint file')
    parser.add_argument('config_b', help='config file of the second model')
    parser.add_argument('checkpoint_b', help='its checkpoint file')
    parser.add_argument('--out', required=True, help='folder for images and numbers')
    parser.add_argument('--images', type=int, default=512, help='use at most so many images (default 512)')
    parser.add_argument('--batch-size', type=int,
                        help='images in a batch, at least 4 (default 32, for detectors 4)')
    add_device_argument(parser)
    add_config_arguments(parser, norm=False)
    args = parser.parse_args(argv)
    if args.images < 4 or args.batch_size is not None and not 4 <= args.batch_size <= args.images:
        parser.error('--batch-size must be at least 4 and at most --images, got '
                     f'{args.batch_size or "none"} and {args.images}')
    return args


def default_batch_size(cfg):
    """The batch size. Detectors get the minimum, because their images are twenty times as large."""
    return 4 if cfg.get('default_scope') == 'mmdet' else 32


def read_batches(cfg, batch_size, images):
    """Batches of at most `images` of the config's test images, with their sizes."""
    loader_cfg = cfg.test_dataloader
    loader_cfg.update(batch_size=batch_size, num_workers=0, persistent_workers=False)
    # Without shuffling, a batch would contain images of one class, which are similar.
    loader_cfg.sampler = dict(type='DefaultSampler', shuffle=True)
    init_default_scope(cfg.get('default_scope', 'mmengine'))
    loader = Runner.build_dataloader(loader_cfg, seed=0)
    total = min(len(loader), images // batch_size)
    for data in tqdm(islice(loader, total), desc='CKA', unit='batch', total=total, disable=None):
        yield data, len(data['data_samples'])


def runner_of(model):
    """A function that runs the feature extractor of a model on a batch."""
    allow_partial_calls(model)  # CKA compares the layers inside, whatever is folded after them
    extract = model.extract_feat if hasattr(model, 'extract_feat') else model

    def run(batch):
        extract(model.data_preprocessor(batch, False)['inputs'])

    return run


@command
def main(argv=None):
    args = parse_args(argv)
    cfgs = [load_config(path, args.cfg_options) for path in (args.config_a, args.config_b)]
    for checkpoint in (args.checkpoint_a, args.checkpoint_b):
        check_checkpoint(checkpoint)  # before loading the first
    check_data(cfgs[0], ['test'])
    out = out_folder(args.out)
    named = 'config' if args.config_a != args.config_b else 'checkpoint'
    paths = [getattr(args, f'{named}_{model}') for model in 'ab']
    names = distinct_names([path.rpartition('.')[0] or path for path in paths])
    models = [load_model(cfg, checkpoint).to(args.device)
              for cfg, checkpoint in zip(cfgs, (args.checkpoint_a, args.checkpoint_b), strict=True)]
    batch_size = args.batch_size or min(default_batch_size(cfgs[0]), args.images)
    try:
        cka, layers_a, layers_b = compare_models(
            read_batches(cfgs[0], batch_size, args.images), *map(runner_of, models),
            *map(branch_layers, models))
    except ValueError as error:
        raise PreflightError(f'no CKA: {error}.') from error
    write_csv(out / 'cka.csv', (f'{names[0]} \\ {names[1]}', *layers_b),
              ((layer, *row) for layer, row in zip(layers_a, cka, strict=True)))
    summary = dict(model_a=names[0], model_b=names[1], layers_a=layers_a, layers_b=layers_b,
                   batch_size=batch_size, cka=np.round(cka, 6).tolist())
    save(cka_figure(cka, layers_a, layers_b, *names), out / 'cka.png')
    if layers_a == layers_b:
        diagonal = cka.diagonal()
        summary['mean_diagonal'] = round(float(np.nanmean(diagonal)), 6)
        save(cka_diagonal_figure({f'{names[0]} and {names[1]}': diagonal}, layers_a),
             out / 'cka_diagonal.png')
        print(f'mean CKA at equal depth: {summary["mean_diagonal"]:.3f}')
    else:
        print('The models have different layers, so there is no diagonal.')
    write_text(out / 'cka.json', json.dumps(summary, indent=1))
    print(f'written: cka.csv, cka.json and figures in {out}')


if __name__ == '__main__':
    main()
