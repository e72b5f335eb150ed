"""Estimates of chip compilers, without the chip, for networks with LN and with folded UN; random weights.

    make chips

Sophgo's compiler estimates milliseconds and the cycles of each operator; Rockchip's lists the operators and the memory
that they move. Each compiler has its own environment. Nothing runs on a chip. A failure is a row with the
compiler's message. Existing rows are kept.
"""
import argparse
import json
import os
import random
import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

from deployed_speed import NETWORKS as CONFIGS
from deployed_speed import ROOT, blurred_images, model_of, update_statistics
from mmunorm import fuse_norms, replace_norms
from mmunorm.cli.arguments import command
from mmunorm.deploy.formats.onnx import lower_opset, write_onnx
from mmunorm.deploy.graph import Exportable
from mmunorm.deploy.rewrite.operators import for_chips
from mmunorm.deploy.vendors.sophgo_profile import read_profile
from mmunorm.norms.layers import norm_layers
from mmunorm.utils import PreflightError, whole_file, write_text
from projects.paper.paper.curves import COLOURS

import torch
from matplotlib.figure import Figure
from PIL import Image
from torch import nn

MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
TIMM = {'DeiT-S, timm': 'deit_small_patch16_224', 'Swin-T, timm': 'swin_tiny_patch4_window7_224'}
NETWORKS = [*(name for name in CONFIGS if name != 'Mask R-CNN'), *TIMM, 'Mask R-CNN, 512 x 512',
            'Mask R-CNN, 800 x 1344']
SOPHGO = ('BM1688', 'BM1684X', 'CV186X')
CHIPS = (*SOPHGO, 'RK3588')
PRECISIONS = ('INT8', 'F16')
ENVIRONMENTS = {'sophgo': 'tpu_mlir 1.30.2', 'rknn': 'rknn-toolkit2 2.5.0'}  # as in requirements/
KEY = ('network', 'norm', 'chip', 'precision')
# Of the figure; the cycles of all other operators are 'other'.
KINDS = {'matrix products': ('MatMul', 'Conv', 'Conv2D'), 'softmax': ('Softmax', ), 'LayerNorm': ('LayerNorm', ),
         'casts': ('Cast', ), 'waiting for memory': ('Load', 'Store'),
         'layouts': ('Permute', 'Reshape', 'Slice', 'Concat', 'SwapDimInner'), 'GELU': ('Lut', 'Active')}
FAILURE = re.compile(r'UNREACHABLE|Assert|error:|Error\b|E build:|not support', re.IGNORECASE)
LAYER = re.compile(r'\] \d+ +(\w+) +\w+ +(?:NPU|CPU|GPU) .*?\d+/\d+/\d+ +(\d+) ')


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--networks', nargs='+', choices=NETWORKS, default=NETWORKS, metavar='NETWORK')
    parser.add_argument('--chips', nargs='+', choices=CHIPS, default=CHIPS, metavar='CHIP')
    parser.add_argument('--precisions', nargs='+', choices=PRECISIONS, default=PRECISIONS)
    parser.add_argument('--out', type=Path, default=ROOT / 'benchmarks/results/chips.jsonl')
    return parser.parse_args(argv)


class Network(nn.Module):
    """Normalized images `(1, 3, H, W)` to logits; of a detector, to the outputs of its neck and its RPN head."""
    inputs = ('images', )

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, images):
        model = self.model
        if hasattr(model, 'rpn_head'):
            maps = model.extract_feat(images)
            scores, deltas = model.rpn_head(maps)
            return (*maps, *scores, *deltas)
        return model(images)


@torch.no_grad()
def randomize(model):
    """Makes norms and biases random, in place: exporters remove a factor of 1 and a summand of 0. Returns the model."""
    for _, norm in norm_layers(model):
        nn.init.uniform_(norm.weight, 0.5, 1.5)
    for parameter in model.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.02)
    return model


def shape_of(network):
    return tuple(map(int, re.findall(r'\d+', network.partition(', ')[2]))) or (224, 224)


def write_network(network, norm, path):
    """Writes a network, UN folded, with LayerNorm as one operator."""
    if network in TIMM:
        import timm
        torch.manual_seed(0)
        model = timm.create_model(TIMM[network])
        if norm != 'LN':
            replace_norms(model, dict(type=norm))
    else:
        model, _ = model_of(network.partition(',')[0], norm)
    randomize(model)
    graph = Network(model).eval().requires_grad_(False)
    images = torch.stack(blurred_images(shape_of(network), 4)).float()
    images = (images - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    update_statistics(model, graph, images)
    fuse_norms(model, layer_norms='keep')
    if any(isinstance(module, nn.Unfold) or hasattr(module, 'window_reverse') for module in graph.modules()):
        graph = for_chips(torch.export.export(graph, (images[:1], ), strict=False))
        graph.inputs = Network.inputs
    write_graph(graph, images, path)


def write_graph(graph, images, path):
    """Writes an ONNX file of opset 17."""
    out = graph(images[:1])
    graph.outputs = tuple(f'out{index}' for index in range(len(out) if isinstance(out, tuple) else 1))
    write_onnx(Exportable(graph, {}, (images[:1], )), path)
    lower_opset(path)


def write_images(images, folder):
    """Writes uint8 images `(3, H, W)` into a new folder, for the ranges of INT8."""
    folder.mkdir()
    for index, image in enumerate(images):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(folder / f'{index}.png')


def run_tool(folder, log, environment, *arguments):
    """Runs a program of an environment in a folder.

    Raises:
        RuntimeError: it failed; the message is the error line of its log.
    """
    binaries = environment_folder(environment) / 'bin'
    with open(folder / log, 'w') as file:
        done = subprocess.run([binaries / arguments[0], *map(str, arguments[1:])], cwd=folder, stdout=file,
                              stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                              env={**os.environ, 'PATH': f'{binaries}:{os.environ["PATH"]}', 'PYTHONPATH': ''})
    if done.returncode:
        raise RuntimeError(error_line((folder / log).read_text(errors='replace')))


def environment_folder(environment):
    folder = ROOT / f'.venv-{environment}'
    if not (folder / 'bin').exists():
        raise PreflightError(f"{folder.name} with {ENVIRONMENTS[environment]} is missing: 'make chips' builds it.")
    return folder


def error_line(text):
    """The first line of a log that names an error, without colours and the paths of this machine."""
    lines = [line.strip() for line in re.sub(r'\x1b\[[\d;]*m', '', text).splitlines() if line.strip()] or ['no message']
    found = next((line for line in lines if FAILURE.search(line)), lines[-1])
    return re.sub(r'(/[\w.-]+)+/', '', found)[:200]


def transform(file, folder, height, width):
    """The network in the format of Sophgo's compiler, converted once in a folder."""
    network = folder / 'network.mlir'
    if not network.exists():
        run_tool(folder, 'transform.log', 'sophgo', 'model_transform', '--model_name', 'network', '--model_def', file,
                 '--input_shapes', f'[[1,3,{height},{width}]]', '--mean', ','.join(map(str, MEAN)),
                 '--scale', ','.join(f'{1 / std:.6f}' for std in STD), '--pixel_format', 'rgb',
                 '--mlir', network.name)
    return network


def compile_sophgo(file, folder, shape, chip, precision):
    """The estimate for one chip, of batch 1 on one core, with random ranges: calibrated ones change it by 0.1 %."""
    network = transform(file, folder, *shape)
    if not (folder / 'ranges').exists():
        names = dict.fromkeys(re.findall(r'loc\("(.*?)"\)', network.read_text()))
        draw = random.Random(0)
        limits = {name: round(draw.uniform(2, 8), 4) for name in names}
        write_text(folder / 'ranges', ''.join(f'{name} {top} {-top} {top}\n' for name, top in limits.items()))
    profile = folder / 'compiler_profile_0.txt'
    profile.unlink(missing_ok=True)
    run_tool(folder, 'deploy.log', 'sophgo', 'model_deploy', '--mlir', network.name, '--quantize', precision,
             '--calibration_table', 'ranges', '--processor', chip.lower(), '--model', 'network.bmodel')
    return read_profile(profile.read_text())


def compile_rockchip(file, folder, shape, chip, precision):
    """The results of the compiler, which estimates no cycles."""
    run_tool(folder, 'rknn.log', 'rknn', 'python', Path(__file__).with_name('chips_rknn.py'), file, precision,
             folder / 'images')
    return read_layers((folder / 'rknn.log').read_text(errors='replace'))


def read_layers(text):
    """Number of operators, megabytes moved and the simulator's SNR, of the log of Rockchip's compiler."""
    layers = LAYER.findall(text.rpartition('Network Layer Information Table')[2])
    return dict(megabytes=sum(int(moved) for _, moved in layers) / 1024,
                snr=float(re.search(r'^SNR: (\S+) dB', text, re.MULTILINE)[1]),
                operators=dict(Counter(name for name, _ in layers).most_common()))


def new_rows(args, old):
    """Yields the missing rows."""
    for network in args.networks:
        for norm in ('LN', 'UN'):
            missing = [(chip, precision) for chip in args.chips for precision in args.precisions
                       if (network, norm, chip, precision) not in old]
            if not missing:
                continue
            with tempfile.TemporaryDirectory() as folder:
                folder = Path(folder)
                write_network(network, norm, folder / 'network.onnx')
                write_images(blurred_images(shape_of(network), 10), folder / 'images')
                for chip, precision in missing:
                    compiler = compile_sophgo if chip in SOPHGO else compile_rockchip
                    row = dict(network=network, norm=norm, chip=chip, precision=precision,
                               compiler=ENVIRONMENTS['sophgo' if chip in SOPHGO else 'rknn'])
                    try:
                        row |= compiler(folder / 'network.onnx', folder, shape_of(network), chip, precision)
                    except RuntimeError as error:
                        row['error'] = str(error)
                    yield row


def chart(rows):
    """Stacked shares of LN's time by kind of operator, for LN and UN, a panel for each precision on one chip."""
    figure = Figure(figsize=(10, 6), layout='constrained')
    kind_of = {name: kind for kind, names in KINDS.items() for name in names}
    for axes, precision in zip(figure.subplots(2, 1), PRECISIONS, strict=True):
        bars = [row for row in rows
                if row['chip'] == 'BM1688' and row['precision'] == precision and 'cycles' in row
                and row['network'] not in TIMM]
        names = [f'{row["network"]}, {row["norm"]}' for row in bars]
        whole = {row['network']: row['cycles'] for row in bars if row['norm'] == 'LN'}
        left = [0.] * len(bars)
        for index, kind in enumerate([*KINDS, 'other']):
            widths = [sum(cycles for name, cycles in row['by_operator'].items() if kind_of.get(name, 'other') == kind)
                      / whole.get(row['network'], row['cycles']) * 100 for row in bars]
            axes.barh(names, widths, left=left, label=kind, color=[*COLOURS, 'lightgrey'][index])
            left = [start + width for start, width in zip(left, widths, strict=True)]
        axes.invert_yaxis()
        axes.set(title=f'BM1688, {precision}', xlabel="% of the cycles with LN, estimates of Sophgo's compiler")
    figure.legend(*axes.get_legend_handles_labels(), fontsize=8, loc='outside right center')
    return figure


@command
def main(argv=None):
    args = parse_args(argv)
    old = args.out.read_text().splitlines() if args.out.exists() else ()
    rows = {tuple(row[key] for key in KEY): row for row in map(json.loads, old)}
    for row in new_rows(args, set(rows)):
        print({key: row.get(key) for key in (*KEY, 'ms', 'error')}, flush=True)
        rows[tuple(row[key] for key in KEY)] = row
        write_text(args.out, ''.join(json.dumps(entry) + '\n' for entry in rows.values()))
    rows = sorted(rows.values(), key=lambda row: NETWORKS.index(row['network']))
    with whole_file(ROOT / 'docs/images/chips.png') as part:
        chart(rows).savefig(part, dpi=120)
    print('python benchmarks/write_scores.py writes the tables of docs/results/chips.md')


if __name__ == '__main__':
    main()
