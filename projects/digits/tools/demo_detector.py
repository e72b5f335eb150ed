"""From a trained detector with LayerNorm to a tested INT8 file. Started by `make demo-detector`.

It makes the data and trains a Mask R-CNN with LayerNorm by the recipes of this project: it stands for the model that
you have. `tools/ship.py` then converts it to UN without labels, folds, and makes one file of it in full-integer INT8,
which is tested and measured beside two files of the same detector with LayerNorm: as it is, and folded exactly. An
interrupted run continues where it stopped.
"""
import argparse
import sys
import time
from pathlib import Path

from mmunorm.cli import run_tool
from mmunorm.cli.arguments import command

ROOT = Path(__file__).resolve().parents[3]
CLASSIFIER = 'projects/digits/configs/swin_ln_classifier.py'
DETECTOR = 'projects/digits/configs/swin_ln_maskrcnn.py'
OUT = 'work_dirs/demo_detector'


def run(title: str, *command: str) -> None:
    """Runs a Python tool of this repository as a user would, and shows how."""
    print(f'\n=== {title}\n$ python {" ".join(command)}', flush=True)
    start = time.time()
    status = run_tool(command, ROOT)
    if status:
        sys.exit(f'It stops here: the command above ended with status {status}.')
    print(f'=== done in {time.time() - start:.0f} s', flush=True)


def train(title: str, config: str, work_dir: str, *options: str) -> str:
    """Trains a model in a work directory; returns its last checkpoint."""
    options = ('--cfg-options', *options) if options else ()
    run(title, 'tools/train.py', config, '--resume', '--work-dir', work_dir, *options)
    return Path(ROOT, work_dir, 'last_checkpoint').read_text().strip()


@command
def main(argv=None) -> None:
    argparse.ArgumentParser(description=__doc__).parse_args(argv)
    start = time.time()
    run('1/4 Data: handwritten digits from scikit-learn', 'projects/digits/tools/make_digits.py')
    classifier = train('2/4 Train a small Swin with LayerNorm', CLASSIFIER, f'{OUT}/classifier')
    detector = train('3/4 Train a Mask R-CNN from its backbone', DETECTOR, f'{OUT}/detector',
                     f'pretrained={classifier}')
    run('4/4 From this checkpoint to a file without norms', 'tools/ship.py', DETECTOR, detector, '--format', 'litert',
        '--int8', 'full', '--to', 'UN', '--steps', '0', '--adapt-steps', '100', '--num-samples', '128', '--out',
        f'{OUT}/ship')
    print(f'\nAll of it took {(time.time() - start) / 60:.1f} minutes.\nThe conclusion, images and numbers: '
          f'{OUT}/ship/report.html')


if __name__ == '__main__':
    main()
