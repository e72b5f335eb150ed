"""What mmunorm does, in a few minutes on two CPU cores. Started by `make demo`.

First in OpenMMLab: one line of a config swaps the norm, tools/train.py trains both, UN folds away, and
fuse_and_benchmark.py prints the paper's Table 8. Then with torch and LiteRT alone: a pretrained ViT-S becomes two
full-integer INT8 files, with LayerNorm and folded exactly. Logs and results are in work_dirs/demo.
"""
import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUT = 'work_dirs/demo'
CONFIG = 'projects/digits/configs/swin_{}_handwriting.py'
NORMS = ('ln', 'un')
STEPS = 270  # of each training: projects/digits/configs/swin_un_handwriting.py
CORES = len(os.sched_getaffinity(0))


def start(log: str, command: list[str], threads: int) -> subprocess.Popen:
    """Starts a tool of this repository, with its output in a file."""
    print(f'$ python {shlex.join(command)}', flush=True)
    # Threads that spin while they wait slow the other process down.
    env = {**os.environ, 'OMP_NUM_THREADS': str(threads), 'GOMP_SPINCOUNT': '20000', 'PYTHONWARNINGS': 'ignore'}
    path = ROOT / OUT / log
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open('w') as file:
        process = subprocess.Popen([sys.executable, *command], cwd=ROOT, env=env, stdout=file,
                                   stderr=subprocess.STDOUT)
    process.log = path
    return process


def finish(processes: list[subprocess.Popen], title: str, done=None, total: int = 1) -> None:
    """Waits for tools, with a bar of `done()` of `total`; ends the demo if one fails."""
    from tqdm import tqdm
    begun = time.time()
    try:
        with tqdm(total=total, desc=f'  {title}', disable=None, leave=False,
                  bar_format='{desc}: {bar} {elapsed}') as bar:
            while any(process.poll() is None for process in processes):
                time.sleep(0.5)
                bar.n = done() if done else 0
                bar.refresh()
                if any(process.poll() for process in processes):
                    break
    finally:
        for process in processes:
            if process.poll() is None:
                process.terminate()
                process.wait()
    failed = next((process for process in processes if process.returncode), None)
    if failed:
        print(*failed.log.read_text().splitlines()[-5:], sep='\n')
        sys.exit(f'The demo stops here: {shlex.join(failed.args[1:])} ended with status {failed.returncode}. '
                 f'Its output: {failed.log}')
    print(f'  {title}: {time.time() - begun:.0f} s', flush=True)


def steps_done() -> int:
    """The steps of all trainings, from their logs."""
    logs = [sorted(Path(ROOT, OUT, norm).glob('*/vis_data/scalars.json')) for norm in NORMS]
    lines = [log[-1].read_text().splitlines() for log in logs if log]
    return sum(json.loads(text[-1]).get('step', 0) for text in lines if text)


def score(folder: str) -> float:
    """The top-1 accuracy that a tool wrote last under a work directory."""
    logs = sorted(path for path in Path(ROOT, OUT, folder).glob('*/*.json') if path.stem == path.parent.name)
    return json.loads(logs[-1].read_text())['accuracy/top1']


def trained_score(norm: str) -> float:
    """The top-1 accuracy of the validation at the end of a training."""
    text = sorted(Path(ROOT, OUT, norm).glob('*/vis_data/scalars.json'))[-1].read_text()
    return float(re.findall(r'"accuracy/top1": ([\d.]+)', text)[-1])


def openmmlab() -> list[str]:
    """Trains and folds classifiers with LN and UN; returns lines of the conclusion."""
    print('\n=== 1/2 OpenMMLab: a config with UN, trained and folded')
    print('The two configs differ in one line:')
    for norm in NORMS:
        line = re.search(r'norm_cfg=dict\([^)]*\)', Path(ROOT, CONFIG.format(norm)).read_text())[0]
        print(f'  {Path(CONFIG.format(norm)).name}: {line}')
    threads = max(1, CORES // len(NORMS))
    finish([start(f'train_{norm}.log', ['tools/train.py', CONFIG.format(norm), '--work-dir', f'{OUT}/{norm}'], threads)
            for norm in NORMS], 'training LN and UN', steps_done, STEPS * len(NORMS))
    checkpoints = {norm: Path(ROOT, OUT, norm, 'last_checkpoint').read_text().strip() for norm in NORMS}
    paths = {norm: os.path.relpath(path, ROOT) for norm, path in checkpoints.items()}
    finish([start(f'test_{norm}.log', ['tools/test.py', CONFIG.format(norm), paths[norm], '--fuse', '--work-dir',
                                       f'{OUT}/{norm}_folded'], threads) for norm in NORMS], 'folding and testing')
    table8 = ['tools/analysis/fuse_and_benchmark.py', CONFIG.format('un'), paths['un'], '--batch-size', '32',
              '--repeat', '15', '--threads', '1', '--out', f'{OUT}/table8']
    finish([start('table8.log', table8, 1)], "the paper's Table 8")
    rows = json.loads(Path(ROOT, OUT, 'table8/benchmark.json').read_text())['rows']
    top1 = {'LN': trained_score('ln'), 'exact': score('ln_folded'), 'UN': trained_score('un'),
            'UN folded': score('un_folded')}
    print(f'\n  {"":10} {"images/s":>9} {"x LN":>6} {"top-1, %":>9}')
    for row in rows:
        name = row['name']
        print(f'  {name:10} {row["throughput"]["median"]:9.0f} {row["to_ln"]["throughput"]["value"]:6.2f} '
              f'{f"{top1[name]:.1f}" if name in top1 else "-":>9}')
    ratio = next(row for row in rows if row['name'] == 'UN folded')['to_ln']['throughput']
    return [f'digits Swin, one seed: top-1 LN {top1["LN"]:.1f}, UN {top1["UN"]:.1f}, UN folded '
            f'{top1["UN folded"]:.1f}; not enough images to rank the norms',
            f'UN folded, no norm left, in torch on this CPU: {ratio["value"]:.2f}x the speed of LN '
            f'(quartiles {ratio["low"]:.2f} to {ratio["high"]:.2f})']


def pretrained() -> list[str]:
    """Exports a pretrained ViT with LN and folded; returns lines of the conclusion."""
    print('\n=== 2/2 torch and LiteRT alone: a pretrained ViT-S, LN and folded exactly, as full-integer INT8 files')
    command = ['projects/photographs/tools/features.py', '--out', OUT]
    print(f'$ python {shlex.join(command)}', flush=True)
    env = {**os.environ, 'PYTHONWARNINGS': 'ignore'}
    done = subprocess.run([sys.executable, *command], cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        return ['pretrained ViT-S: left out, because of the error above']
    *lines, _ = done.stdout.strip().splitlines()[-3:]
    return [f'ViT-S, {line}' for line in lines] + [
        'a gain in integers alone: in float, and in INT8 files that compute norms in float, LN is as fast (README.md)']


def main(argv=None) -> None:
    argparse.ArgumentParser(description=__doc__).parse_args(argv)
    begun = time.time()
    shutil.rmtree(ROOT / OUT, ignore_errors=True)
    lines = [*openmmlab(), *pretrained()]
    print('\n=== what came out', *(f'- {line}' for line in lines), sep='\n')
    picture = Path(OUT, 'features.png')
    print(f'All of it took {(time.time() - begun) / 60:.1f} minutes. '
          f'{f"The picture: {picture}" if (ROOT / picture).exists() else f"Logs: {OUT}"}')


if __name__ == '__main__':
    main()
