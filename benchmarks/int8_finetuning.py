"""What quantization-aware fine-tuning gives back of what INT8 costs a trained classifier, its norms folded.

    python benchmarks/int8_finetuning.py CONFIG CHECKPOINT [CHECKPOINT...] --steps 100

Several checkpoints are seeds. The model with its rounding learns the logits of the model without, on the training
pictures of the config: no labels. Then OpenVINO and ONNX Runtime quantize the weights that it has found.
"""
import argparse
import copy
import json
import tempfile
from pathlib import Path

import mmunorm  # registers everything, and mmcv's operators before mmdet asks for them

# isort: split
import torch
from mmengine.runner import Runner as MMRunner
from tqdm import tqdm

from mmunorm.benchmark.environment import environment
from mmunorm.cli.arguments import command, load_config, positive, set_dataloader_defaults
from mmunorm.cli.calibration import test_metrics, test_pictures, training_pictures
from mmunorm.deploy.benchmark import main_metrics
from mmunorm.deploy.export import loaded_model
from mmunorm.deploy.graphs import graph_of
from mmunorm.deploy.int8 import samples_of
from mmunorm.deploy.int8.noise import decibels
from mmunorm.deploy.int8.simulate import simulate, trained_weights
from mmunorm.deploy.rows import Subject
from mmunorm.deploy.runner import Runner
from mmunorm.deploy.testing import ExportedModel
from mmunorm.deploy.torch_runner import TorchRunner
from mmunorm.engine.repeatable import seed_everything

# isort: split
from int8 import ROOT, cell, centred, logits


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('config')
    parser.add_argument('checkpoints', nargs='+')
    parser.add_argument('--steps', type=positive, default=100)
    parser.add_argument('--lr', type=float, default=1e-5)
    parser.add_argument('--bits', type=positive, nargs='+', default=[8, 6], help='that the fine-tuning simulates')
    parser.add_argument('--num-samples', type=positive, default=100, help='training pictures for the ranges')
    parser.add_argument('--num-pictures', type=positive, default=500, help='test pictures for the signal to noise')
    parser.add_argument('--batch', type=positive, default=10)
    parser.add_argument('--out', type=Path, default=ROOT / 'benchmarks/results', help='folder of the results')
    return parser.parse_args(argv)


def fine_tuned(model, cfg, samples, bits, args):
    """The model with weights that have learned to be rounded."""
    student = simulate(model, samples, bits, trainable=True).requires_grad_(True)
    optimizer = torch.optim.AdamW(student.parameters(), args.lr, weight_decay=0.)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    seed_everything([0])
    loader = MMRunner.build_dataloader({**cfg.train_dataloader, 'persistent_workers': False}, seed=0)
    with tqdm(total=args.steps, desc=f'{bits} bits', unit='step') as bar:
        while bar.n < args.steps:
            for _, batch in zip(range(args.steps - bar.n), loader, strict=False):
                inputs = model.data_preprocessor(batch, True)['inputs']
                with torch.no_grad():
                    wanted = centred(model(inputs, mode='tensor'))
                loss = (centred(student(inputs, mode='tensor')) - wanted).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                bar.set_postfix_str(f'loss {loss.item():.4g}')
                bar.update()
    trained = copy.deepcopy(model)
    trained.load_state_dict(trained_weights(student))
    return trained


def measure(checkpoint, args, folder):
    """One dict a row: `training`, `form`, `metrics`, and `snr` in dB."""
    cfg = load_config(args.config)
    set_dataloader_defaults(cfg)
    model, meta = loaded_model(cfg, checkpoint)
    mmunorm.fuse_norms(model)
    pictures = training_pictures(cfg, args.num_samples)
    samples = samples_of(model, meta, pictures, args.batch)
    exact = None
    for bits in (None, *args.bits):
        trained = model if bits is None else fine_tuned(model, cfg, samples, bits, args)
        where = folder / str(bits)
        where.mkdir()
        subject = Subject('model', trained, meta, args.batch, where, torch.get_num_threads(), pictures)
        arrays = ExportedModel(subject.eager()).arrays(test_pictures(cfg, args.num_pictures))
        forms = {'float': subject.eager(), 'OpenVINO INT8': Runner(subject.file('openvino', 'int8-folded')),
                 'ONNX Runtime INT8': Runner(subject.file('onnx', 'int8-folded')),
                 **{f'{number} bits simulated': TorchRunner(graph_of(simulate(trained, samples, number)),
                                                            subject.traced.meta) for number in args.bits}}
        for form, runner in forms.items():
            got = logits(runner, arrays)
            exact = got if exact is None else exact
            error = (got - exact).square().sum()
            yield dict(training='none' if bits is None else f'{args.steps} steps, {bits} bits', form=form,
                       metrics=main_metrics(test_metrics(cfg, ExportedModel(runner), form)),
                       snr=decibels(exact.square().sum(), error) if error else None)


@command
def main(argv=None):
    args = parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    seeds = []
    for seed, checkpoint in enumerate(args.checkpoints):
        with tempfile.TemporaryDirectory() as folder:
            seeds.append(list(measure(checkpoint, args, Path(folder))))
        with open(args.out / 'int8_finetuning.jsonl', 'a') as file:
            for row in seeds[-1]:
                print(json.dumps(dict(config=Path(args.config).stem, seed=seed, lr=args.lr, **row,
                                      environment=environment(torch.device('cpu')))), file=file)
    print('| fine-tuning | form | metrics | signal to noise, dB |\n|---|---|---|---|')
    for rows in zip(*seeds, strict=True):
        metrics = ', '.join(f'{key} {cell([row["metrics"][key] for row in rows])}' for key in rows[0]['metrics'])
        snr = '' if rows[0]['snr'] is None else cell([row['snr'] for row in rows])
        print(f'| {rows[0]["training"]} | {rows[0]["form"]} | {metrics} | {snr} |')


if __name__ == '__main__':
    main()
