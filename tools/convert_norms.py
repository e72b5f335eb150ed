"""Converts the LayerNorms of a trained model to offline norms, without labels."""
import argparse
import copy
import json
import os
from pathlib import Path

from mmunorm.checkpoints.loading import check_checkpoint, load_weights
from mmunorm.cli.arguments import (
    add_config_arguments,
    add_device_argument,
    command,
    load_config,
    non_negative,
    out_folder,
    positive,
    set_dataloader_defaults,
)
from mmunorm.cli.data_checks import check_data
from mmunorm.config.models import build_model
from mmunorm.config.presets import HELP, REPLACED_TYPE, renamed
from mmunorm.conversion import ConversionError, convert_norms
from mmunorm.engine.calibration import FolderImages, samples_of, test_metrics, training_batches
from mmunorm.engine.conversion import adapt_backbone, backbone_of, parse_goal
from mmunorm.utils import PreflightError, whole_file, write_text

from mmengine.runner.checkpoint import save_checkpoint, weights_to_cpu
from mmpretrain.models.classifiers import BaseClassifier


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('config', help='config file of a model with LayerNorm')
    parser.add_argument('checkpoint', help='its checkpoint, or a published one: docs/checkpoints.md')
    parser.add_argument('--out', required=True, help='folder for the converted checkpoint, its config and a table')
    parser.add_argument('--to', default='UN', metavar='NORM', help=f'the norm to convert to (default: UN): {HELP}')
    parser.add_argument('--num-samples', type=positive, default=512, metavar='N',
                        help='training images for the statistics (default: 512)')
    parser.add_argument('--images', metavar='FOLDER',
                        help="use the images in this folder instead of the config's training data; no labels needed")
    parser.add_argument('--adapt-steps', type=non_negative, default=0, metavar='N',
                        help='then train the backbone for this many steps to match its outputs with LayerNorm, without '
                        'labels (default: 0; typical: 300)')
    parser.add_argument('--keep', nargs='+', default=[], metavar='NAME',
                        help='LayerNorms to keep: full names from the table, or of modules that hold them')
    parser.add_argument('--test', action='store_true',
                        help='print the test metrics before and after, and write them to OUT/metrics.json')
    add_device_argument(parser)
    add_config_arguments(parser, norm=False)
    return parser.parse_args(argv)


def check_converted(folder, name, checkpoint):
    """Raises a PreflightError if :func:`save_converted` would overwrite a file that is not its own."""
    paths = [folder / f'{name}.{suffix}' for suffix in ('pth', 'py')]
    if os.path.realpath(paths[0]) == os.path.realpath(checkpoint):
        raise PreflightError(f'--out {folder}: {paths[0]} is the checkpoint to convert; choose another folder.')
    for path in paths:
        if path.exists() and not path.with_suffix('.md').exists():
            raise PreflightError(f'--out {folder}: {path} is not from a conversion; choose another folder.')


def converted_config(cfg, model, report, norm_cfg, teacher):
    """The config of a converted model: its type is `ReplacedNorms`, with a list of the converted norms.

    It is trained by distillation from the checkpoint `teacher` of the LayerNorm model, whose config is `cfg`.
    """
    new = copy.deepcopy(cfg)
    new.pop('pretrained', None)
    imports = new.get('custom_imports') or dict(imports=[], allow_failed_imports=False)
    listed = [imports['imports']] if isinstance(imports['imports'], str) else imports['imports']
    new.custom_imports = {**imports, 'imports': list(dict.fromkeys([*listed, 'mmunorm']))}
    if isinstance(new.model.get('backbone'), dict):
        new.model.backbone.init_cfg = None  # the checkpoint has all weights
    if isinstance(new.model.get('backbone'), dict) or isinstance(model, BaseClassifier):
        new.custom_hooks = [*(new.get('custom_hooks') or []), dict(type='DistillationHook', checkpoint=teacher)]
    converted = {model.get_submodule(norm.norm) for norm in report.converted}
    names = [name for name, module in model.named_modules(remove_duplicate=False) if module in converted]
    new.model.update(type=REPLACED_TYPE, of=new.model.type, norm_cfg=dict(norm_cfg), converted=names)
    return new


def save_converted(model, cfg, report, folder, name, meta):
    """Writes checkpoint, config, and the report as Markdown to `folder`, each file atomically; returns the paths.

    `cfg` is the result of :func:`converted_config`, `name` that of the files without suffix, and `meta` that of the
    original checkpoint, such as its `dataset_meta`. The written config loads the checkpoint.
    """
    checkpoint, config, table = (folder / f'{name}.{suffix}' for suffix in ('pth', 'py', 'md'))
    cfg.load_from = str(checkpoint)
    kept = {key: value for key, value in meta.items() if key == 'dataset_meta'}
    with whole_file(checkpoint) as part:
        save_checkpoint(dict(meta={**kept, 'cfg': cfg.pretty_text}, state_dict=weights_to_cpu(model.state_dict())),
                        str(part))
    write_text(config, cfg.pretty_text)
    write_text(table, report.markdown())
    return [checkpoint, config, table]


@command
def main(argv=None):
    args = parse_args(argv)
    cfg = load_config(args.config, args.cfg_options)
    name, norm_cfg = parse_goal(args.to)
    check_checkpoint(args.checkpoint)
    check_data(cfg, ['train'] * (args.images is None) + ['test'] * args.test)
    set_dataloader_defaults(cfg)
    out, stem = out_folder(args.out), renamed(Path(args.config).stem, 'LN', name)
    check_converted(out, stem, args.checkpoint)
    model = build_model(cfg)
    meta = load_weights(model, args.checkpoint)
    model.to(args.device).eval()
    teacher = copy.deepcopy(backbone_of(model)) if args.adapt_steps else None
    if args.adapt_steps and teacher is None:
        raise PreflightError(f'--adapt-steps {args.adapt_steps}: {args.config} has no backbone to train.')
    if args.images is None:
        batches = training_batches(cfg, args.num_samples)
        samples = samples_of(batches)
    else:
        samples = FolderImages(cfg, args.images)
        batches = samples.batches(args.num_samples, (cfg.get('train_dataloader') or cfg.test_dataloader).batch_size)
    metrics = {'before': test_metrics(cfg, model, 'testing before')} if args.test else {}
    try:
        report = convert_norms(model, batches, norm_cfg, args.keep, progress=True)
        print(report)
        if teacher is not None:
            print(adapt_backbone(model, teacher, samples, args.adapt_steps, len(batches[0]['inputs'])))
    except ConversionError as error:  # errors of the norm were raised by parse_goal
        raise PreflightError(f'{args.config} cannot be converted: {error}.') from error
    if args.test:
        metrics['after'] = test_metrics(cfg, model, 'testing after')
        for key, before in metrics['before'].items():
            print(f'{key}: {before:.4g} before, {metrics["after"][key]:.4g} after')
        write_text(out / 'metrics.json', json.dumps(metrics))
    new = converted_config(cfg, model, report, norm_cfg, args.checkpoint)
    for path in save_converted(model, new, report, out, stem, meta):
        print(f'written: {path}')
    return report, metrics


if __name__ == '__main__':
    main()
