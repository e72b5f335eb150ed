"""Compares Swin-T with LN and with UN in torch and in the runtimes, in float and in INT8; random weights.

    python benchmarks/deployed_speed.py

The rows are those of tools/deploy/benchmark.py, without metrics, and it writes them anew. UN's statistics are those of
what its norms read.
"""
import argparse
import json
import tempfile
from pathlib import Path

import mmunorm  # noqa: F401  registers everything, and mmcv's operators before mmdet asks for them

# isort: split
import torch

from mmunorm.cli.arguments import command, load_config, positive
from mmunorm.config.models import build_model
from mmunorm.deploy.benchmark import markdown, measure_formats
from mmunorm.deploy.export import describe_model
from mmunorm.deploy.formats import FORMS
from mmunorm.deploy.graphs import graph_of
from mmunorm.deploy.pictures import batch_of
from mmunorm.deploy.subjects import Subject
from mmunorm.norms import OfflineNorm

ROOT = Path(__file__).parent.parent


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--configs', nargs='+', help='the first is the baseline (default: Swin-T with LN and with UN)',
                        default=[ROOT / f'configs/swin_t_{norm}_imagenet.py' for norm in ('ln', 'un')])
    parser.add_argument('--formats', nargs='+', choices=list(FORMS), metavar='FORMAT',
                        default=['torch', 'onnx', 'onnx-int8', 'openvino', 'openvino-int8'])
    parser.add_argument('--batch', type=positive, default=1)
    parser.add_argument('--repeat', type=positive)
    parser.add_argument('--threads', type=positive, default=torch.get_num_threads())
    parser.add_argument('--out', type=Path, default=ROOT / 'benchmarks/results', help='folder of the results')
    return parser.parse_args(argv)


def noise(shape, number):
    """Blurred pictures, uint8 `(3, h, w)`."""
    small = torch.rand(number, 3, *(side // 8 for side in shape), generator=torch.Generator().manual_seed(0)) * 255
    return list(torch.nn.functional.interpolate(small, shape, mode='bicubic').clamp(0, 255).byte())


@torch.no_grad()
def take_statistics(model, arrays):
    """Gives each offline norm the mean square of what it reads, one after the other."""
    def measure(norm, args):
        norm.running_var.copy_(args[0].flatten(0, -2).square().mean(0))

    handles = [norm.register_forward_pre_hook(measure) for norm in model.modules() if isinstance(norm, OfflineNorm)]
    graph_of(model)(*map(torch.from_numpy, arrays))
    for handle in handles:
        handle.remove()


@command
def main(argv=None):
    args = parse_args(argv)
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        subjects = []
        for config in args.configs:
            cfg = load_config(config)
            torch.manual_seed(0)
            model = build_model(cfg).eval()
            meta = describe_model(model, cfg, {})
            pictures = noise(meta['shape'][2:], 20)
            take_statistics(model, [torch.stack(pictures[:4]).float().numpy()])
            subjects.append(Subject(Path(config).stem, model, meta, args.batch, Path(folder, str(len(subjects))),
                                    args.threads, pictures))
        arrays = batch_of(pictures[:args.batch], meta)
        result = measure_formats(subjects, args.formats, arrays, lambda *_: {}, args.repeat)
    print(markdown(result))
    args.out.mkdir(parents=True, exist_ok=True)
    with open(args.out / 'deployed_speed.jsonl', 'w') as file:
        for row in result['rows']:
            measured = {key: value for key, value in row.items() if key != 'seconds'}
            settings = {key: result[key] for key in ('batch', 'shape', 'threads', 'repeat', 'control', 'environment')}
            print(json.dumps({**measured, **settings}), file=file)


if __name__ == '__main__':
    main()
