"""Runs the whole way on handwritten digits. Started by `make demo`.

It makes the data, trains a classifier with LayerNorm, and converts it to UN. From that backbone it trains a detector,
tests it, draws its predictions, folds its norms, tests it again, and exports it to one file, which OpenVINO tests.
Training takes half of the recipes' steps. An interrupted demo continues where it stopped.
"""
import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LAYER_NORM_CONFIG = 'configs/digits/swin_ln_classifier.py'
CONVERTED_CONFIG = 'configs/convert/swin_un_classifier_converted.py'
DETECTOR_CONFIG = 'configs/digits/swin_un_maskrcnn.py'
LAYER_NORM = 'work_dirs/demo/layer_norm'
CONVERTED = 'work_dirs/demo/converted'
CLASSIFIER = 'work_dirs/demo/classifier'
DETECTOR = 'work_dirs/demo/detector'
PICTURES = 'work_dirs/demo/pictures'
SHEET = 'work_dirs/demo/predictions.png'
FOLDED = 'work_dirs/demo/folded.pth'
BENCHMARK = 'work_dirs/demo/benchmark'
EXPORTED = 'work_dirs/demo/detector.xml'


def run(title: str, *command: str) -> None:
    """Runs a Python tool of this repository as a user would, and shows how."""
    print(f'\n=== {title}\n$ python {" ".join(command)}', flush=True)
    start = time.time()
    # Threads that spin long while they wait slow down a machine that has other work, tenfold and more.
    env = {'GOMP_SPINCOUNT': '20000', **os.environ}
    status = subprocess.run([sys.executable, *command], cwd=ROOT, env=env).returncode
    if status:
        sys.exit(f'The demo stops here: the command above ended with status {status}.')
    print(f'=== done in {time.time() - start:.0f} s', flush=True)


def train(title: str, config: str, work_dir: str, *options: str) -> str:
    """Trains a model in a work directory; returns its last checkpoint."""
    run(title, 'tools/train.py', config, '--resume', '--work-dir', work_dir, '--cfg-options', *options)
    return Path(ROOT, work_dir, 'last_checkpoint').read_text().strip()


def newest_metrics(work_dir: str) -> dict:
    """The metrics that `tools/test.py` logged last under `work_dir`."""
    logs = Path(ROOT, work_dir).glob('*/*.json')
    return json.loads(max(logs, key=lambda path: path.stat().st_mtime).read_text())


def validated(work_dir: str) -> dict:
    """The metrics of a training's last validation."""
    logs = sorted(Path(ROOT, work_dir).glob('*/vis_data/scalars.json'))
    entries = [json.loads(line) for log in logs for line in log.read_text().splitlines()]
    return next(entry for entry in reversed(entries) if any('/' in key for key in entry))


def draw_sheet(count: int = 8) -> None:
    """Puts the first few pictures on one sheet, four in a row."""
    from torchvision.io import read_image
    from torchvision.utils import make_grid, save_image
    pictures = [read_image(str(path)) for path in sorted(Path(ROOT, PICTURES).iterdir())[:count]]
    save_image(make_grid(pictures, nrow=4) / 255, Path(ROOT, SHEET))


def print_metrics() -> None:
    """Prints the table of all tests: the folded model and the file are the same function."""
    print('|      |          |    AP |  AP50 |  AP75 |')
    print('|------|----------|-------|-------|-------|')
    for model, metrics in (('UN', validated(DETECTOR)), ('folded', newest_metrics('work_dirs/demo/test_folded')),
                           ('OpenVINO', newest_metrics('work_dirs/demo/test_exported'))):
        for label, key in (('box', 'bbox'), ('mask', 'segm')):
            values = (metrics[f'coco/{key}_{name}'] for name in ('mAP', 'mAP_50', 'mAP_75'))
            print(f'| {label:4} | {model:8} | ' + ' | '.join(f'{value:5.3f}' for value in values) + ' |')


def convert() -> str:
    """The first five steps; returns the checkpoint of a classifier with UN."""
    run('1/11 Data: handwritten digits from scikit-learn', 'tools/dataset/make_digits.py')
    layer_norm = train('2/11 Train a small Swin with LayerNorm: it stands for the model that you have',
                       LAYER_NORM_CONFIG, LAYER_NORM, 'train_cfg.max_epochs=4')
    run('3/11 Turn its norms into UN, without training', 'tools/convert_norms.py', LAYER_NORM_CONFIG, layer_norm,
        '--out', CONVERTED)
    classifier = train('4/11 Train that on for a while, taught by the model with LayerNorm', CONVERTED_CONFIG,
                       CLASSIFIER, f'load_from={CONVERTED}/swin_un_classifier.pth',
                       f'custom_hooks.0.checkpoint={layer_norm}', 'train_cfg.max_epochs=1', 'param_scheduler.1.end=94')
    run('5/11 Fold it and test it: no norm is left', 'tools/test.py', CONVERTED_CONFIG, classifier, '--fuse',
        '--work-dir', 'work_dirs/demo/test_converted')
    return classifier


def main() -> None:
    start = time.time()
    classifier = convert()
    config = DETECTOR_CONFIG
    checkpoint = train('6/11 Train a Mask R-CNN from its backbone', config, DETECTOR, f'pretrained={classifier}',
                       'train_cfg.max_iters=350', 'train_cfg.val_interval=350', 'param_scheduler.1.end=350')
    run('7/11 Draw what it finds on val scenes', 'tools/infer.py', config, checkpoint, 'data/digits/coco/val',
        '--limit', '12', '--score-thr', '0.3', '--out-dir', PICTURES)
    run('8/11 Fold its norms away, and measure what that gains', 'tools/analysis/fuse_and_benchmark.py', config,
        checkpoint, '--save', FOLDED, '--out', BENCHMARK, '--repeat', '25')
    run('9/11 Test the folded detector', 'tools/test.py', config, FOLDED, '--work-dir', 'work_dirs/demo/test_folded')
    run('10/11 Make it one file for OpenVINO', 'tools/deploy/export.py', config, checkpoint, '--format', 'openvino',
        '--out', EXPORTED)
    run('11/11 Test that file, without a model of torch', 'tools/deploy/test.py', config, EXPORTED, '--work-dir',
        'work_dirs/demo/test_exported')

    draw_sheet()
    print(f'\nMask R-CNN with a UN Swin on 200 val scenes ({(time.time() - start) / 60:.1f} minutes)\n')
    print_metrics()
    print(f'\nPictures: {PICTURES}, eight of them in {SHEET}')
    print(f'Folded checkpoint: {FOLDED}\nFile for OpenVINO: {EXPORTED}, and the .bin beside it')
    print(f'Speed and memory: the table above, with a chart in {BENCHMARK}')
    before, after = (metrics['accuracy/top1'] for metrics in (
        validated(LAYER_NORM), newest_metrics('work_dirs/demo/test_converted')))
    print(f'The classifier: top-1 {before:.1f} with LayerNorm, {after:.1f} converted, without a norm')


if __name__ == '__main__':
    main()
