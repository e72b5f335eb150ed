"""Measures metrics, speed and size of a model in torch and the runtimes, compared with a baseline such as LayerNorm.

The baseline, or the only model, is measured twice if it has LayerNorms: as it is, and with these folded exactly.
"""
import argparse
import copy
import tempfile
from pathlib import Path

from mmunorm.benchmark.files import markdown, measure_formats
from mmunorm.benchmark.output import write_results
from mmunorm.benchmark.subjects import Subject
from mmunorm.cli.arguments import (
    add_config_arguments,
    command,
    load_config,
    out_folder,
    positive,
    set_dataloader_defaults,
    threads,
)
from mmunorm.cli.data_checks import check_data
from mmunorm.deploy.formats import VARIANTS
from mmunorm.deploy.openmmlab import PARTS, loaded_model
from mmunorm.deploy.tasks import batch_of
from mmunorm.deploy.tasks.features import WithRest
from mmunorm.engine.calibration import test_images, test_metrics, training_images
from mmunorm.norms.replace import layer_norms
from mmunorm.utils import PreflightError

import torch


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('config', help='config file of the model, the data and the metrics')
    parser.add_argument('checkpoint', help='checkpoint file')
    parser.add_argument('--baseline', nargs=2, metavar=('CONFIG', 'CHECKPOINT'),
                        help='a second model to compute ratios to, in the same format, such as the one with LayerNorm')
    parser.add_argument('--formats', nargs='+', choices=list(VARIANTS), metavar='FORMAT',
                        help=f'rows to measure, from {", ".join(VARIANTS)} (default: all)')
    parser.add_argument('--file', nargs=2, metavar=('FORMAT', 'FILE'),
                        help='use a file written by export.py for one of the rows instead of a new one')
    parser.add_argument('--batch', type=positive, default=1, help='batch size (default: 1)')
    parser.add_argument('--shape', type=positive, nargs=2, metavar=('H', 'W'),
                        help='height and width of the input, as in export.py')
    parser.add_argument('--parts', choices=PARTS, default=PARTS[0],
                        help='what of the models, as in export.py; metrics are those with the rest in torch')
    parser.add_argument('--num-samples', type=positive, default=300,
                        help='training images for INT8 calibration (default: 300)')
    parser.add_argument('--repeat', type=positive,
                        help='rounds, with one batch of each row (default: as many as fit in 45 s)')
    parser.add_argument('--metrics-of', nargs='*', choices=list(VARIANTS), metavar='FORMAT',
                        help='test these alone, or none; speed and size are measured of all (default: test all)')
    parser.add_argument('--threads', type=threads, help="threads of the CPU (default: torch's choice)")
    parser.add_argument('--out', help='folder of the results (default: work_dirs/CONFIG/formats)')
    add_config_arguments(parser)
    return parser.parse_args(argv)


@command
def main(argv=None):
    args = parse_args(argv)
    for name in args.formats or ():  # by default, rows of missing packages report them
        chosen, form = VARIANTS[name]
        chosen.check(form.int8)
    formats = args.formats or list(VARIANTS)
    if args.file and args.file[0] not in formats:
        raise PreflightError(f'--file {args.file[0]}: must be one of --formats, {", ".join(formats)}.')
    if args.file and not Path(args.file[1]).is_file():
        raise PreflightError(f'--file: there is no exported model {args.file[1]}.')
    if args.threads:
        torch.set_num_threads(args.threads)
    pairs = [*([args.baseline] if args.baseline else []), (args.config, args.checkpoint)]
    cfgs = [load_config(config, args.cfg_options) for config, _ in pairs[:-1]]
    cfgs.append(load_config(args.config, args.cfg_options, args.norm))
    out = out_folder(args.out or Path('work_dirs', Path(args.config).stem, 'formats'))
    wants_int8 = any(VARIANTS[name][1].int8 for name in formats)
    for cfg in cfgs:
        check_data(cfg, ['train', 'test'] if wants_int8 else ['test'])
        set_dataloader_defaults(cfg)
    with tempfile.TemporaryDirectory() as folder:
        subjects, models = [], {}
        for (config, checkpoint), cfg in zip(pairs, cfgs, strict=True):
            name = Path(config).stem
            if name in models:
                name += ' (model)'
            model, meta = loaded_model(cfg, checkpoint, args.shape, args.parts)
            images = training_images(cfg, args.num_samples) if wants_int8 else ()
            forms = {name: ('exact', model)}
            if not subjects and layer_norms(model):
                forms = {name: ('keep', model), f'{name} (exact)': ('exact', copy.deepcopy(model))}
            for form, (how_far, folded) in forms.items():
                models[form] = cfg, folded
                subjects.append(Subject(form, folded, meta, args.batch, Path(folder, str(len(subjects))),
                                        torch.get_num_threads(), images, how_far))
        if args.file:
            subjects[-1].use_file(args.file[0], Path(args.file[1]))
        arrays = batch_of(test_images(cfgs[-1], args.batch), subjects[-1].exportable.meta)

        tested = {VARIANTS[name][1].label for name in (formats if args.metrics_of is None else args.metrics_of)}

        def metrics_of(subject, runner, title):
            if title.removeprefix(f'{subject.name}, ') not in tested:
                return {}
            cfg, model = models[subject.name]
            model = WithRest(runner, model) if args.parts == 'backbone' else runner
            return test_metrics(cfg, model, title)

        result = measure_formats(subjects, formats, arrays, metrics_of, args.repeat)
    write_results(result, markdown(result), out, 'formats')
    return result


if __name__ == '__main__':
    main()
