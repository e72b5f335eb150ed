"""Compares networks with LN, LN folded exactly and UN folded, in torch and in the runtimes, in float and in INT8.

    python benchmarks/deployed_speed.py

    python benchmarks/deployed_speed.py --draw     # measures nothing: docs/images/deployed_speed.png from the results

Weights are random. The rows are those of tools/deploy/benchmark.py, without metrics. Earlier rows of the same network
and number of threads are replaced. UN's statistics are measured on the inputs of its norms.
"""
import argparse
import json
import re
import tempfile
from pathlib import Path

from mmunorm.benchmark.files import measure_formats
from mmunorm.benchmark.models import EXACT, LN
from mmunorm.benchmark.output import quartiles, speedup
from mmunorm.benchmark.subjects import Subject
from mmunorm.cli.arguments import command, load_config, positive, threads
from mmunorm.config.models import build_model
from mmunorm.config.pretrained import pretrained_path, set_pretrained
from mmunorm.deploy.formats import VARIANTS
from mmunorm.deploy.formats.base import silent
from mmunorm.deploy.openmmlab import describe_model
from mmunorm.deploy.tasks import batch_of, find_task
from mmunorm.norms import OfflineNorm
from mmunorm.tables import markdown_table
from mmunorm.utils import write_text
from projects.paper.paper.curves import NORM_COLOURS
from projects.paper.paper.figures import small_labels
from projects.paper.paper.layout import finish, new_panels, save

import torch

ROOT = Path(__file__).parent.parent
NETWORKS = {'Swin-T': 'configs/swin_t_un_imagenet.py', 'DeiT-S': 'projects/deep/configs/deit_s_un_imagenet.py',
            'T2T-ViT-14': 'configs/t2t_vit_14_un_imagenet.py', 'Mask R-CNN': 'configs/swin_t_un_maskrcnn_3x.py'}
NORMS = (LN, EXACT, 'UN')
COLOURS = {LN: NORM_COLOURS[LN], EXACT: '0.4', 'UN': NORM_COLOURS['UN']}
DETECTOR_SHAPE = (512, 512)
# In the order of the tables and of the figure.
FORMATS = ('torch', 'onnx', 'openvino', 'litert', 'executorch', 'onnx-int8', 'openvino-int8', 'executorch-int8',
           'litert-dynamic', 'litert-products', 'litert-full')


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--networks', nargs='+', choices=NETWORKS, default=list(NETWORKS), metavar='NETWORK')
    parser.add_argument('--formats', nargs='+', choices=list(VARIANTS), metavar='FORMAT', default=FORMATS)
    parser.add_argument('--batch', type=positive, default=1)
    parser.add_argument('--repeat', type=positive)
    parser.add_argument('--threads', type=threads, nargs='+', default=[1, 2])
    parser.add_argument('--out', type=Path, default=ROOT / 'benchmarks/results', help='folder of the results')
    parser.add_argument('--draw', type=Path, nargs='?', const=ROOT / 'docs/images/deployed_speed.png', metavar='IMAGE',
                        help='measure nothing, and draw the results in the folder')
    return parser.parse_args(argv)


def blurred_images(shape, number):
    """Blurred images, uint8 `(3, h, w)`."""
    small = torch.rand(number, 3, *(side // 8 for side in shape), generator=torch.Generator().manual_seed(0)) * 255
    return list(torch.nn.functional.interpolate(small, shape, mode='bicubic').clamp(0, 255).byte())


@torch.no_grad()
def update_statistics(model, run, *inputs):
    """Sets the statistics of each offline norm, one by one, to the mean square of its input in `run(*inputs)`."""
    def measure(norm, args):
        norm.running_var.copy_(args[0].flatten(0, -2).square().mean(0))

    handles = [norm.register_forward_pre_hook(measure) for norm in model.modules() if isinstance(norm, OfflineNorm)]
    run(*inputs)
    for handle in handles:
        handle.remove()


def model_of(network, norm):
    """A network with one norm and random weights, and its config."""
    cfg = load_config(str(ROOT / NETWORKS[network]), norm=norm)
    if pretrained_path(cfg) is not None:
        set_pretrained(cfg, None)
    torch.manual_seed(0)
    model = build_model(cfg).eval()
    with silent():  # mmengine logs every parameter
        model.init_weights()  # else a Swin's position biases are 0, and converters remove them
    return model, cfg


def subject_of(network, norm, folder, batch=1, threads=1):
    """A network with one of `NORMS`, and its images."""
    model, cfg = model_of(network, LN if norm == EXACT else norm)
    meta = describe_model(model, cfg, {}, DETECTOR_SHAPE if hasattr(model, 'roi_head') else None)
    images = blurred_images(meta['shape'][2:], 20)
    update_statistics(model, find_task(model).graph(model), *map(torch.from_numpy, batch_of(images[:4], meta)))
    return Subject(norm, model, meta, batch, folder / norm, threads, images,
                   layer_norms='exact' if norm == EXACT else 'keep')


def table(rows):
    """The table of a network and number of threads, one row per form."""
    by_form = {}
    for row in rows:
        by_form.setdefault(row['label'], {})[row['model']] = row
    lines = []
    for label, pair in by_form.items():
        cells = [label]
        for norm in NORMS:
            row = pair[norm]
            cells.append(row['error'] or f'{row["latency_ms"]["median"]:.4g} '
                         f'[{row["latency_ms"]["low"]:.4g}, {row["latency_ms"]["high"]:.4g}]')
        cells += [speedup(pair[norm]['to_baseline']) if 'to_baseline' in pair[norm] else ''
                  for norm in NORMS[1:]]
        cells.append(f'{pair["UN"]["size"] / 1e6:.3g}' if 'size' in pair['UN'] else '')
        lines.append(cells)
    return markdown_table(
        ['form', 'LN, ms', 'exact, ms', 'UN folded, ms', 'exact over LN', 'UN over LN', 'UN, MB'], lines)


def chart(rows):
    """Milliseconds per image with one thread: medians and quartiles, one panel per network.

    A network's rows are those of the machine on which most of its formats were measured. A speed-up is shown if the
    quartiles exclude 1 and the difference is larger than that of the control.
    """
    rows = [row for row in rows if row['threads'] == 1 and row['format'] in VARIANTS]
    labels = {row['format']: row['label'] for row in rows}
    formats = [name for name in FORMATS if name in labels]
    networks = [name for name in NETWORKS if any(row['network'] == name for row in rows)]
    figure, panels = new_panels(len(networks))
    for axes, network in zip(panels, networks, strict=True):
        by_machine = {}
        for row in rows:
            if row['network'] == network:
                by_machine.setdefault(row['environment']['cpu'], {})[row['format'], row['model']] = row
        cpu, found = max(by_machine.items(), key=lambda item: len(item[1]))
        for y, name in enumerate(formats):
            if (name, 'UN') not in found:
                axes.text(0.01, y, 'not measured', color='0.5', fontsize='small', va='center',
                          transform=axes.get_yaxis_transform())
                continue
            for model in filter(lambda model: (name, model) in found, COLOURS):
                time = found[name, model]['latency_ms']
                axes.plot([time['low'], time['high']], [y] * 2, color=COLOURS[model], alpha=0.5)
                axes.plot(time['median'], y, 'o', color=COLOURS[model], markersize=5, label=model)
            speed, control = found[name, 'UN']['to_baseline'], found[name, 'UN']['control']['ratio']
            if not speed['low'] <= 1 <= speed['high'] and abs(speed['value'] - 1) > abs(control['value'] - 1):
                end = max(found[name, model]['latency_ms']['high'] for model in ('LN', 'UN'))
                axes.annotate(f'{speed["value"]:.2f}x', (end, y), (5, 0), textcoords='offset points',
                              fontsize='small', va='center')
        axes.set_yticks(range(len(formats)), [labels[name] for name in formats], fontsize='small')
        axes.set(xlim=(0, 1.2 * axes.get_xlim()[1]), ylim=(len(formats) - 0.4, -0.6))
        small_labels(axes, 'ms per image', '')
        axes.set_title(f'{network}, {re.sub("[(].*?[)]| Processor", "", cpu)}, 1 thread', fontsize='small')
    finish(figure, 0.175 * len(formats), 'LN, LN folded exactly, and folded UN: time, and speed-up of UN')
    return figure


@command
def main(argv=None):
    args = parse_args(argv)
    if args.draw:
        save(chart([json.loads(line) for path in sorted(args.out.glob('deployed_speed*.jsonl'))
                    for line in path.read_text().splitlines()]), args.draw)
        return print(f'written: {args.draw}')
    rows = []
    for network in args.networks:
        with tempfile.TemporaryDirectory() as folder:
            subjects = [subject_of(network, norm, Path(folder), args.batch) for norm in NORMS]
            arrays = batch_of(subjects[0].images[:args.batch], subjects[0].exportable.meta)
            for threads in args.threads:
                torch.set_num_threads(threads)
                for subject in subjects:
                    subject.threads = threads
                result = measure_formats(subjects, args.formats, arrays, lambda *_: {}, args.repeat)
                settings = {key: result[key] for key in ('batch', 'shape', 'threads', 'repeat', 'control',
                                                         'environment')}
                new = [{**row, 'network': network, **settings} for row in result['rows']]
                for row in new:
                    row.pop('seconds', None)
                rows += new
                control = quartiles(result['control']['ratio'])
                print(f'\n{network}, threads: {threads}, control: {control}\n', *table(new), sep='\n', flush=True)
    out = args.out / 'deployed_speed.jsonl'
    measured = {(row['network'], row['threads']) for row in rows}
    if out.exists():
        old = map(json.loads, out.read_text().splitlines())
        rows = [row for row in old if (row['network'], row['threads']) not in measured] + rows
    args.out.mkdir(parents=True, exist_ok=True)
    write_text(out, ''.join(json.dumps(row) + '\n' for row in rows))
    print(f'written: {out}')


if __name__ == '__main__':
    main()
