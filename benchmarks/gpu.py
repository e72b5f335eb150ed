"""Runs the GPU benchmarks in 12 minutes, most important first, and packs the results into one archive.

    make gpu
    python benchmarks/gpu.py --vit vit_s_focus.onnx --crops data/crops   # with `adapt`, as benchmarks/adapt_vit.py
    python benchmarks/gpu.py --parts kernels table8 trtexec --minutes 25
    python benchmarks/gpu.py --device cpu             # tiny sizes, to check this script; the numbers are meaningless

Each command is a process with a time limit. If one fails, its error is on the page, and the next one runs. OUT/gpu.zip
has the page gpu.md, the training curves, the rows, and a log of each command. The rows of a GPU are also written to
benchmarks/results, those of a command as soon as it ends.
"""
import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from fuse_models import CONFIGS
from fuse_models import result_file as fusion_file
from mmunorm.benchmark.environment import device_name, environment, result_file
from mmunorm.cli.arguments import command, load_config
from mmunorm.config.models import build_model
from mmunorm.tables import markdown_table
from mmunorm.utils import PreflightError, write_text
from norm_layers import ROOT
from projects.paper.paper.curves import read_scalars

import torch

MINUTES = 12
NO_GPU = {'CUDA_VISIBLE_DEVICES': ''}


class Run(NamedTuple):
    """One command: its name, its time limit in seconds, and its additional environment variables."""
    name: str
    limit: float
    command: list
    environment: dict = {}


def python(*arguments):
    return [sys.executable, *map(str, arguments)]


def kernels(device, out):
    yield Run('kernels', 240, python('-m', 'tests.norms.kernels.triton_cases'),
              {'TRITON_INTERPRET': str(int(device == 'cpu'))})


def layers(device, out):
    size = ('--batch', 1, '--rounds', 1) if device == 'cpu' else ('--batch', 128, '--dtypes', 'float16', '--rounds', 20)
    yield Run('layers', 40, python('benchmarks/norm_layers.py', '--norms', 'UN', 'BatchNorm', *size,
                                   '--device', device, '--out', out / 'report/results'))


def steps(device, out):
    """AMP first, which people train with; eager mode with Triton and without it, then compiled."""
    runs = (('eager', 'fp16', 60), ('compiled', 'fp16', 100), ('eager', 'none', 35))
    size = ('--batch', 64)
    if device == 'cpu':
        runs = (('eager', 'bf16', 60), )
        size = ('--config', 'projects/digits/configs/swin_un_classifier.py', '--batch', 1, '--size', 32, '--rounds', 1)
    for mode, amp, limit in runs:  # the script writes one file a call
        yield Run(f'step {mode} {amp}', limit, python(
            'benchmarks/train_step.py', '--modes', mode, '--amp', amp, *size, '--device', device,
            '--out', out / f'report/results/{mode}_{amp}'))


def inference(device, out):
    configs = ['projects/digits/configs/swin_un_classifier.py'] if device == 'cpu' else [
        f'configs/{name}.py' for name in CONFIGS]
    for config in configs:
        size = ('--shape', 32, 32, '--batches', 1, '--amp', 'bf16', '--modes', 'eager', '--rounds', 1) if (
            device == 'cpu') else ('--seconds', 25)
        yield Run(f'inference {Path(config).stem}', 45, python(
            'benchmarks/inference.py', '--configs', config, *size, '--device', device,
            '--out', out / 'report/results'))


def adapt(device, out, vit='VIT', crops='CROPS'):
    size = ('--limit', 8, '--batch', 2, '--steps', 2, '--block-steps', 1, '--trial-steps', 1) if device == 'cpu' else (
        '--seconds', 270)
    yield Run('adapt', 300, python('benchmarks/adapt_vit.py', vit, crops, *size, '--device', device,
                                   '--out', out / 'report/adapt'))


def table8(device, out, mode='eager'):
    size = ('--batch-size', 1, '--repeat', 1) if device == 'cpu' else ('--preset', 'paper', '--repeat', 15)
    for model in CONFIGS:
        yield Run(f'table8 {mode} {model}', 240, python(
            'benchmarks/fuse_models.py', '--configs', f'configs/{model}.py', '--modes', mode, *size,
            '--device', device, '--out', out / 'report/results'))


def table8_compiled(device, out):
    return table8(device, out, 'compiled')


def digits(device, out):
    data, runs = out / 'digits', out / 'digits_runs'
    size = ('--train-images', 640, '--val-images', 100) if device == 'cpu' else ()
    yield Run('digits data', 60, python('projects/digits/tools/make_digits.py', '--out', data, '--train-scenes', 10,
                                        '--val-scenes', 10, *size))
    options = ['train_cfg.max_epochs=2', 'default_hooks.logger.interval=5',
               *(f'{split}_dataloader.dataset.data_root={data}/imagenet' for split in ('train', 'val'))]
    amp = ([], ['optim_wrapper.type=BFloat16OptimWrapper'], {}) if device == 'cpu' else (['--amp'], [], {})
    trainings = {f'{device}_amp': amp, 'cpu': ([], [], NO_GPU)}
    if device != 'cpu':  # where compiling takes longest
        trainings[f'{device}_compiled'] = ['--amp'], ['compile=True'], {}
    for name, (flags, more, variables) in trainings.items():
        yield Run(f'digits {name}', 90, python(
            'tools/train.py', 'projects/digits/configs/swin_un_classifier.py', *flags, '--work-dir', runs / name,
            '--cfg-options', *options, *more), variables)
    logged = [runs / name for name in trainings if list((runs / name).glob('*/vis_data/scalars.json'))]
    if logged:
        yield Run('digits curves', 60, python('projects/paper/tools/curves.py', *logged, '--out', out / 'report'))


def trtexec(device, out):
    family, batch = ('projects/digits/configs/swin_{}_classifier', 1) if device == 'cpu' else (
        'configs/swin_t_{}_imagenet', 32)
    for norm in ('ln', 'un'):
        config, weights, onnx = f'{family.format(norm)}.py', out / f'{norm}.pth', out / f'{norm}.onnx'
        if shutil.which('trtexec'):
            torch.manual_seed(0)
            model = build_model(load_config(str(ROOT / config)))
            torch.save(dict(state_dict=model.state_dict(), meta={}), weights)
            yield Run(f'onnx {norm}', 120, python('tools/deploy/export.py', config, weights, '--format', 'onnx',
                                                  '--batch', batch, '--out', onnx), NO_GPU)
        yield Run(f'trtexec {norm}, batch {batch}', 120, ['trtexec', f'--onnx={onnx}', '--fp16'])


# The commands with the longest compilation are last and get the remaining time.
PARTS = {part.__name__: part for part in (
    steps, layers, inference, adapt, digits, kernels, table8, trtexec, table8_compiled)}
DEFAULT_PARTS = ('steps', 'layers', 'inference', 'adapt', 'digits')


def run(command, limit, log, environment):
    """Runs a command with its output in the file `log`; returns its result in a few words."""
    with log.open('w') as file:
        if limit <= 0:
            return 'no time left'
        try:
            process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **environment}, stdout=file,
                                       stderr=subprocess.STDOUT, start_new_session=True)
        except FileNotFoundError:
            return 'not installed'
        try:
            status = process.wait(limit)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)  # with its child processes
            process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            return f'stopped after {limit:.0f} s'
    text = log.read_text(errors='replace')
    if status:
        return f'failed (status {status}): {text.strip().rpartition(chr(10))[2][:300]}'
    found = re.search(r'Throughput: [\d.]+ qps', text)  # of trtexec
    return found[0] if found else 'done'


def git_commit():
    """The commit of this checkout; '' without git or history."""
    with suppress(FileNotFoundError):
        return subprocess.run(['git', 'rev-parse', 'HEAD'], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    return ''


def fusion_table(path):
    """Table 8: images/s of each model, with its peak memory in MB."""
    cells = {}
    for row in map(json.loads, path.read_text().splitlines() if path.is_file() else ()):
        cells.setdefault((row['model'], row['mode']), {})[row['name']] = (
            f'{row["throughput"]["median"]:.4g} ({row["peak_memory"] / 1e6:.0f})')
    names = list(dict.fromkeys(name for row in cells.values() for name in row))
    return markdown_table(('model', 'mode', *names), [
        (*key, *(row.get(name, '-') for name in names)) for key, row in cells.items()])


def digits_table(folder):
    """The last loss and the accuracy of each run on the digits."""
    rows = []
    for path in sorted(folder.glob('*/*/vis_data/scalars.json')):
        scalars = read_scalars(path)
        rows.append([path.parents[2].name, *(
            f'{scalars[name][-1, 1]:.4g}' if name in scalars else '-' for name in ('loss', 'accuracy/top1'))])
    return markdown_table(('run', 'last loss', 'top-1'), rows)


def write_page(rows, out):
    """Writes report/gpu.md."""
    about = rows[0]['environment']
    lines = [f'# Benchmarks on {about["device"]}', '', f'torch {about["versions"]["torch"]}, CUDA {about["cuda"]}, '
             f'commit {rows[0]["commit"]}', '',
             *markdown_table(('command', 'result', 'seconds'), [
                 (row['name'], row['result'].replace('|', '/'), f'{row["seconds"]:.0f}') for row in rows]),
             '', '## Table 8: images/s (peak memory, MB)', '',
             *fusion_table(fusion_file(out / 'report/results', about['device'])),
             '', '## Two epochs of digits', '', *digits_table(out / 'digits_runs')]
    if (out / 'report/curves.png').exists():
        lines += ['', '![Training curves](curves.png)']
    for row in rows:
        log = (out / 'report' / row['log']).read_text(errors='replace').splitlines()
        lines += ['', f'## {row["name"]}', '', '```', f'$ {row["command"]}', *log[-20:], '```']
    write_text(out / 'report/gpu.md', '\n'.join(lines) + '\n')


def copy_rows(source, target):
    """Copies the files of rows; those of one name in several folders become one file."""
    files = defaultdict(list)
    for path in sorted(source.rglob('*.jsonl')):
        files[path.name].append(path.read_text())
    for name, texts in files.items():
        (target / name).write_text(''.join(texts))


@command
def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--device', choices=['cuda', 'cpu'], default='cuda')
    parser.add_argument('--parts', nargs='+', choices=PARTS, default=DEFAULT_PARTS, help='default: %(default)s')
    parser.add_argument('--minutes', type=float, default=MINUTES, help='in all, default: %(default)s')
    parser.add_argument('--vit', help='weights of a ViT, for the part `adapt`; see benchmarks/adapt_vit.py')
    parser.add_argument('--crops', help='folder with train and test, for the part `adapt`')
    parser.add_argument('--out', type=Path, default=ROOT / time.strftime('work_dirs/gpu_%Y%m%d_%H%M%S'),
                        help='a new folder')
    args = parser.parse_args(argv)
    if args.device == 'cuda' and not torch.cuda.is_available():
        raise PreflightError('torch finds no GPU (`--device cpu` runs tiny sizes to check the script).')
    if args.out.exists():
        raise PreflightError(f'--out {args.out} exists already; choose a new folder.')
    out, device = args.out.resolve(), torch.device(args.device)
    (out / 'report/logs').mkdir(parents=True)
    path = result_file(out / 'report/results', 'gpu', device)
    rows, commit, end = [], git_commit(), time.time() + args.minutes * 60
    parts = dict(PARTS, adapt=partial(adapt, vit=args.vit, crops=args.crops))
    for part in args.parts:
        if part == 'adapt' and not (args.vit and args.crops):
            print('\n=== adapt is left out: it needs --vit and --crops', flush=True)
            continue
        for name, limit, words, variables in parts[part](args.device, out):
            line = shlex.join(words).replace(sys.executable, 'python').replace(f'{ROOT}/', '')
            print(f'\n=== {name}\n$ {line}', flush=True)
            start, log = time.time(), f'logs/{re.sub("[^a-z0-9]+", "_", name)}.log'
            if args.device == 'cpu':
                limit, variables = 10 * limit, {**variables, **NO_GPU}
            else:
                limit = min(limit, end - start)
            result = run(words, limit, out / 'report' / log, variables)
            rows.append(dict(part=part, name=name, command=line, result=result, seconds=time.time() - start, log=log,
                             commit=commit, environment=environment(device)))
            print(f'=== {result}', flush=True)
            path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
            write_page(rows, out)
            archive = shutil.make_archive(str(out / 'gpu'), 'zip', out / 'report')  # after each command
            if args.device == 'cuda':
                copy_rows(out / 'report/results', ROOT / 'benchmarks/results')
    print(f'\n{device_name(device)}: {out}/report/gpu.md\nTo send back: {archive}')


if __name__ == '__main__':
    main()
