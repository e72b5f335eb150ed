"""Exports a trained model with folded norms to a file for a runtime: offline norms whole, of LayerNorms the weights."""
import argparse
import json
from pathlib import Path

from mmunorm.cli.arguments import (
    add_config_arguments,
    command,
    load_config,
    out_file,
    positive,
    set_dataloader_defaults,
)
from mmunorm.cli.data_checks import check_data
from mmunorm.deploy.formats import FORMATS, find_format, format_of, table
from mmunorm.deploy.forms import fold_for, runs_on
from mmunorm.deploy.openmmlab import PARTS, loaded_model, prepare_export
from mmunorm.deploy.preprocessing import Samples
from mmunorm.deploy.saving import export_file
from mmunorm.deploy.tasks import TASKS
from mmunorm.engine.calibration import training_images
from mmunorm.fusion.report import by_reason
from mmunorm.utils import PreflightError, warn


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, epilog=f'formats:\n\n{table()}',
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('config', help='config file')
    parser.add_argument('checkpoint', help='checkpoint file')
    parser.add_argument('--format', required=True, help='format of the file; see the table below')
    parser.add_argument('--half', action='store_true', help='weights in float16')
    parser.add_argument('--int8', nargs='?', const='', metavar='KIND',
                        help='quantize to INT8; the table below lists the kinds, the default first')
    parser.add_argument('--num-samples', type=positive, default=300,
                        help='training images for INT8 calibration (default: 300)')
    parser.add_argument('--vendor', nargs='+', type=named_value, metavar='NAME=VALUE',
                        help="of compilers of chips: the compiler's own options, such as accelerator=ethos-u65-256 "
                        '(ethos-u), target_platform=rk3576 (rknn), processor=bm1684x (sophgo) or '
                        'activation_type=QUInt16 (qnn)')
    parser.add_argument('--dynamic', action='store_true', help='take any number of images')
    parser.add_argument('--parts', choices=PARTS, default=PARTS[0],
                        help="of any detector, backbone is backbone and neck, in ONNX and OpenVINO; the rest stays in "
                        'torch (default: whole)')
    parser.add_argument('--batch', type=positive, help='images at once (default: 1)')
    parser.add_argument('--shape', type=positive, nargs=2, metavar=('H', 'W'),
                        help='height and width of the input (default: those of the test pipeline; for a detector, a '
                        'square for landscape and portrait images)')
    parser.add_argument('--layer-norms', choices=['exact', 'keep'], default='exact',
                        help='fold what is linear in LayerNorms, in the form for the file, or leave them as they are '
                        '(default: exact)')
    parser.add_argument('--out', help='file to write (default: the checkpoint, with the suffix of the format; in '
                        'INT8 also with _int8)')
    add_config_arguments(parser)
    args = parser.parse_args(argv)
    if args.dynamic and args.batch:
        parser.error('--batch cannot be combined with --dynamic, which accepts any batch size')
    if args.int8 is not None and (args.half or args.dynamic):
        parser.error(f'--{"half" if args.half else "dynamic"} cannot be combined with --int8')
    return args


def named_value(text):
    """NAME=VALUE as a pair; a value is JSON, such as a number or true, or text."""
    name, equals, value = text.partition('=')
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(f'must be NAME=VALUE, got {text!r}')
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def file_of(text, checkpoint, chosen, int8):
    """The output path; its name has the kind of INT8 if the format has several."""
    suffix = chosen.suffixes[0]
    if text is None:
        quantized = set(chosen.int8_kinds) - set(chosen.float_kinds)
        kind = f'_int8{f"_{int8}" if len(quantized) > 1 else ""}' if int8 in quantized else f'_{int8}' if int8 else ''
        out = checkpoint.with_name(f'{checkpoint.stem}{kind}{suffix}')
    else:
        has_suffix = any(text.endswith(form.suffixes[0]) for form in FORMATS.values())
        out = Path(text if has_suffix else text + suffix)
    if format_of(out) is not chosen:  # such as m.qnn.onnx for ONNX
        raise PreflightError(f'--out {text} has the suffix of another format: this one has {suffix}.')
    if checkpoint == out.with_suffix('.bin'):
        raise PreflightError(f'the export would overwrite the checkpoint {checkpoint}; choose another --out.')
    return out


@command
def main(argv=None):
    args = parse_args(argv)
    chosen = find_format(args.format)
    int8 = chosen.check(args.int8, '--int8')
    options = dict(args.vendor or ())
    chosen.check_options(options)
    cfg = load_config(args.config, args.cfg_options, args.norm)
    if args.out is not None:
        out_file(args.out, '--out')
    out = file_of(args.out, Path(args.checkpoint), chosen, int8)
    out_file(out, '--out', args.checkpoint)
    if chosen.needs_images(int8):
        check_data(cfg, ['train'])
        set_dataloader_defaults(cfg)
    model, meta = loaded_model(cfg, args.checkpoint, args.shape, args.parts)
    samples = ()
    if chosen.needs_images(int8):
        samples = Samples(training_images(cfg, args.num_samples), meta, args.batch or 1)
    calibration = runs_on(TASKS[meta['task']].graph, samples) if samples else None
    report = fold_for(model, int8, calibration=calibration, layer_norms=args.layer_norms)
    print(f'folded: {report.summary}')
    for names, kind, why in by_reason((fold.norm, fold.kind, fold.where) for fold in report.kept):
        warn(f'{names}: not folded ({kind}): {why}')
    exportable = prepare_export(model, meta, args.batch or 1, args.dynamic)
    written = export_file(exportable, chosen, out, args.half, int8, samples, **options)
    batch, _, height, width = exportable.meta['shape']
    number = 'any number of images' if batch is None else f'{batch} image' + 's' * (batch > 1)
    print(written, f'takes: {number} of {height} x {width} pixels', chosen.usage(written.path), sep='\n')
    return written


if __name__ == '__main__':
    main()
