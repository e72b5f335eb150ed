"""Runs of the real tools, in this process, on tiny data."""
import copy
import gc
import importlib.util
import json
import math
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.config import utils as config_utils
from mmengine.optim import build_optim_wrapper
from mmengine.registry import MODELS
from mmengine.runner import loops, runner
from mmengine.utils import ManagerMixin
from mmpretrain.registry import DATASETS
from torch import nn
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter
from yapf.yapflib import yapf_api

from mmunorm.compat import add_safe_globals
from mmunorm.config.models import build_model
from mmunorm.norms import Norm

from . import data_makers

ROOT = Path(__file__).parent.parent

CLASSIFIER = """
_base_ = ['mmpretrain::_base_/default_runtime.py', '{root}/configs/_base_/mmunorm.py']
model = dict(
    type='ImageClassifier',
    backbone=dict(
        type='UNSwinTransformer', arch=dict(embed_dims=12, depths={depths}, num_heads={heads}),
        img_size=32, window_size=4, out_indices=({last}, ), drop_path_rate=0.0,
        norm_cfg=dict(type='UN', warmup_iters=1)),
    neck=dict(type='GlobalAveragePooling'),
    head=dict(type='LinearClsHead', num_classes=2, in_channels={channels}))
data_preprocessor = dict(mean=[127.0] * 3, std=[127.0] * 3, to_rgb=True, num_classes=2)
pipeline = [dict(type='LoadImageFromFile'), dict(type='Resize', scale=32), dict(type='PackInputs')]
train_dataloader = dict(
    batch_size=2, num_workers=0, sampler=dict(type='DefaultSampler', shuffle=True),
    dataset=dict(type='CustomDataset', data_root='{data}', pipeline=pipeline))
val_dataloader = train_dataloader
test_dataloader = train_dataloader
val_evaluator = dict(type='Accuracy', topk=1)
test_evaluator = val_evaluator
optim_wrapper = dict(optimizer=dict(type='SGD', lr=0.1, weight_decay=0.1))
train_cfg = dict(by_epoch=True, max_epochs=1)
val_cfg = dict()
test_cfg = dict()
auto_scale_lr = dict(base_batch_size=8)
randomness = dict(seed=0)
"""

DETECTOR = """
_base_ = ['{root}/configs/swin_t_un_maskrcnn_3x.py']
model = dict(
    backbone=dict(
        arch=dict(
            _delete_=True, embed_dims=12, depths=[1, 1, 1, 1], num_heads=[1, 2, 4, 8]), init_cfg=None),
    neck=dict(in_channels=[12, 24, 48, 96], out_channels=32),
    rpn_head=dict(in_channels=32, feat_channels=32),
    roi_head=dict(
        bbox_roi_extractor=dict(out_channels=32), bbox_head=dict(in_channels=32, fc_out_channels=16),
        mask_roi_extractor=dict(out_channels=32), mask_head=dict(in_channels=32, conv_out_channels=32)))
"""


def load_tool(name):
    """The module of tools/{name}.py; of projects/PROJECT/tools/{name}.py for 'PROJECT:name'."""
    project, _, name = name.rpartition(':')
    folder = ROOT / 'projects' / project / 'tools' if project else ROOT / 'tools'
    spec = importlib.util.spec_from_file_location(f'tool_{project}_{name}', folder / f'{name}.py')
    module = importlib.util.module_from_spec(spec)
    if str(folder) not in sys.path:
        sys.path.append(str(folder))  # a tool imports the modules beside it
    spec.loader.exec_module(module)
    return module


def skip_what_is_slow():
    """What runs and exports of a tiny model spend most of their time on, and no test reads."""
    loops.time = SimpleNamespace(sleep=lambda seconds: None)  # two seconds between epochs of an iteration-based loop
    yapf_api.FormatCode = lambda text, **_: (text, False)  # of each logged config
    runner.collect_env = dict  # starts a compiler
    config_utils.load = cache(config_utils.load)  # 85 metafiles for each `mmpretrain::` in a config
    torch.onnx.export = _onnx_export


def _onnx_export(*args, export=torch.onnx.export, **kwargs):
    _read_translations_once()
    return export(*args, **kwargs)


@cache
def _read_translations_once():
    """Each export of torch.onnx reads the translations of all operators for two seconds, and adds its own."""
    from torch.onnx._internal.exporter._registration import ONNXRegistry
    read = cache(ONNXRegistry.from_torchlib)

    def from_torchlib(**version):
        registry = copy.copy(read(**version))
        registry.functions = {name: [*functions] for name, functions in registry.functions.items()}
        return registry

    ONNXRegistry.from_torchlib = staticmethod(from_torchlib)


def call(tool, *arguments, trusts=True):
    """Runs a tool, a module or its name, as in a separate process: mmengine keeps loggers for a whole process."""
    tool = load_tool(tool) if isinstance(tool, str) else tool
    if trusts and add_safe_globals is list and vars(tool).keys() & {
            'add_config_arguments', 'add_runner_arguments', 'add_trust_argument'}:
        arguments += '--trust-checkpoint',  # which checkpoints of a training need before torch 2.4
    pending = [ManagerMixin]
    while pending:
        cls = pending.pop()
        pending += cls.__subclasses__()
        cls._instance_dict.clear()
    try:
        return tool.main([str(argument) for argument in arguments])
    finally:
        # Left to the garbage collector, each worker takes five seconds to end.
        for workers in [value for value in gc.get_objects() if type(value) is _MultiProcessingDataLoaderIter]:
            workers._shutdown_workers()


def error_of(capsys, tool, *arguments, status=2, trusts=True):
    """The line on stderr that a tool ends with; besides it there are only progress, warnings and argparse's usage."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        call(tool, *arguments, trusts=trusts)
    text = capsys.readouterr().err
    lines = [line for line in text.splitlines() if line.strip() and '%|' not in line and 'warning: ' not in line]
    assert stop.value.code == status, text
    assert lines[0].startswith('usage: ') or len(lines) == 1 and lines[0].startswith('error: '), text
    return lines[-1]


def checkpoint(path):
    """The content of a checkpoint, on the CPU."""
    return torch.load(path, map_location='cpu', weights_only=False)


def scalars(work_dir):
    """The logged scalars of the runs in a work directory, in order."""
    return [json.loads(line) for log in sorted(Path(work_dir).glob('*/vis_data/scalars.json')) for line in log.open()]


def configs_in(folder):
    """The names of a folder's configs that are no `_base_`."""
    return sorted(path.relative_to(folder).with_suffix('').as_posix()
                  for path in folder.rglob('*.py') if '_base_' not in path.parts)


def shrink(cfg):
    """Shrinks the Swin of a config to few blocks and channels, or its T2T-ViT to few layers; returns the config."""
    backbone = cfg.model.backbone
    if backbone.type == 'UNSwinTransformer':
        backbone.arch = dict(embed_dims=24, depths=[1] * 4, num_heads=[1, 2, 4, 8])
    else:
        backbone.num_layers = 4
    return cfg


def check_norms_and_decay(cfg, norm, least=11):
    """All norms of a config's model, `least` of them, are `norm`, and have no weight decay; other weights have some."""
    model = build_model(cfg)
    norms = [module for module in model.modules() if isinstance(module, (Norm, nn.LayerNorm))]
    assert len(norms) >= least and {type(norm) for norm in norms} == {MODELS.get(norm.upper())}
    wrapper = build_optim_wrapper(model, cfg.optim_wrapper)
    decay = {id(parameter): group['weight_decay'] for group in wrapper.optimizer.param_groups
             for parameter in group['params']}
    assert len(decay) == sum(parameter.requires_grad for parameter in model.parameters())
    assert {decay[id(parameter)] for layer in norms for parameter in layer.parameters()
            if parameter.requires_grad} == {0.0}
    assert max(decay.values()) == cfg.optim_wrapper.optimizer.weight_decay


def train_and_test_one_step(config, options, metrics):
    """Trains a config in `w`, and tests what it saved; returns the checkpoint's weights."""
    call('train', config, '--work-dir', 'w', '--cfg-options', *options)
    logged = {key: value for entry in scalars('w') for key, value in entry.items()}
    losses = [value for key, value in logged.items() if key.startswith('loss')]
    assert losses and all(map(math.isfinite, losses))
    path = next(Path('w').glob('*_1.pth'))
    state = checkpoint(path)['state_dict']
    assert all(tensor.isfinite().all() for tensor in state.values())
    tested = call('test', config, path, '--work-dir', 'w', '--cfg-options', *options)
    assert metrics <= set(tested)
    # The same weights were validated after the step.
    assert all(tested[key] == pytest.approx(logged[key], abs=1e-3) for key in metrics)
    return state


def write_classifier(folder, stages=2):
    """A small classifier's config in `folder`, with two classes of two 32x32 images each, and one block a stage."""
    rng = np.random.default_rng(0)
    for name in ('dark', 'light'):
        (folder / 'data' / name).mkdir(parents=True)
        for i in range(2):
            image = rng.integers(0, 100, (32, 32, 3), dtype=np.uint8) + (155 if name == 'light' else 0)
            cv2.imwrite(str(folder / 'data' / name / f'{i}.png'), image.astype(np.uint8))
    config = folder / 'classifier.py'
    config.write_text(CLASSIFIER.format(root=ROOT, data=folder / 'data', depths=[1] * stages, heads=[1, 2][:stages],
                                        last=stages - 1, channels=12 * stages))
    return config


def save_weights(cfg, path, classes):
    """A checkpoint of untrained weights, with class names as a trained one has them."""
    with torch.random.fork_rng():
        torch.manual_seed(0)  # fixtures of a session run before a test is seeded
        model = build_model(cfg)
        model.init_weights()
    torch.save(dict(state_dict=model.state_dict(), meta=dict(dataset_meta=dict(classes=classes))), path)
    return path


def ln_twin(config):
    """A config of :func:`write_classifier` with LayerNorm, and untrained weights; both are beside it."""
    twin = config.with_name('swin_ln_tiny.py')
    twin.write_text(config.read_text().replace("dict(type='UN', warmup_iters=1)", "dict(type='LN')"))
    return twin, save_weights(Config.fromfile(twin), twin.with_name('ln.pth'), ('dark', 'light'))


def untrained_classifier(folder, stages=2):
    """The config of :func:`write_classifier`, its untrained weights, and the folder of its data."""
    config = write_classifier(folder, stages)
    return config, save_weights(Config.fromfile(config), folder / 'a.pth', ('dark', 'light')), folder / 'data'


def write_detector(folder):
    """A narrow Mask R-CNN's config in `folder`, and the options that let it use tiny COCO data there."""
    config = folder / 'detector.py'
    config.write_text(DETECTOR.format(root=ROOT))
    return config, tiny_data(Config.fromfile(config), folder / 'coco')


def tiny_data(cfg, root, monkeypatch=None):
    """Writes data like that of `cfg` under `root`; returns the `--cfg-options` for one step on all of it.

    `monkeypatch` lets a CIFAR class accept the MD5 sums of the tiny files.
    """
    dataset = cfg.train_dataloader.dataset
    if dataset.type == 'CocoDataset':
        data_makers.make_coco(root)
        return [*run_options(cfg, root), *coco_options(cfg, root, 'instances_val2017.json')]
    if dataset.type == 'ImageNet':
        data_makers.make_imagenet(root)
        return [*run_options(cfg, root), 'train_dataloader.dataset.indices=2']
    if dataset.type in ('CIFAR10', 'CIFAR100'):
        cls = DATASETS.get(f'mmpretrain.{dataset.type}')
        for table, entries in data_makers.make_cifar(root, cls, images=1).items():
            monkeypatch.setattr(cls, table, entries)
        return run_options(cfg, root, batch_size=10)
    raise NotImplementedError(f'no tiny data in the format of {dataset.type}')


def run_options(cfg, root, batch_size=2):
    """The options for one step on small batches of the data in `root`."""
    options = [f'{split}_dataloader.{setting}'
               for split in ('train', 'val', 'test')
               for setting in (f'dataset.data_root={root}', f'batch_size={batch_size}', 'num_workers=0')]
    return options + step_options(cfg)


def step_options(cfg):
    """The options for one step, whatever the data."""
    options = ['default_hooks.checkpoint.save_optimizer=False', 'default_hooks.checkpoint.interval=1',
               'default_hooks.logger.interval=1', 'randomness.seed=0', 'train_cfg.val_interval=1']
    options.append('train_cfg.max_iters=1' if 'max_iters' in cfg.train_cfg else 'train_cfg.max_epochs=1')
    # A scheduler that begins after the end is an error.
    schedulers = cfg.param_scheduler if isinstance(cfg.param_scheduler, list) else []
    options += [f'param_scheduler.{i}.begin=0' for i, scheduler in enumerate(schedulers)
                if scheduler.get('begin', 0) > 0]
    return options + ['pretrained=None'] * ('pretrained' in cfg)


def coco_options(cfg, root, ann_file):
    """Small images, few regions of interest, and some detections from weights that know nothing."""
    options = [f'{split}_evaluator.ann_file={root}/annotations/{ann_file}' for split in ('val', 'test')]
    options += ['model.train_cfg.rpn_proposal.max_per_img=50', 'model.train_cfg.rcnn.sampler.num=16',
                'model.test_cfg.rpn.max_per_img=50', 'model.test_cfg.rcnn.max_per_img=5',
                'model.test_cfg.rcnn.score_thr=0.0']
    for split in ('train', 'val', 'test'):
        key = f'{split}_dataloader.dataset.pipeline'
        options += _small_steps(cfg[f'{split}_dataloader'].dataset.pipeline, key)
    return options


def _small_steps(steps, key):
    """Replaces each size in a pipeline by one that a CPU can train on in a test."""
    options = []
    for i, step in enumerate(steps):
        if isinstance(step, (list, tuple)):
            options += _small_steps(step, f'{key}.{i}')
            continue
        options += [f'{key}.{i}.{name}={value}'
                    for name, value in (('scale', '(96,72)'), ('scales', '[(64,96),(72,96)]'),
                                        ('crop_size', '(48,64)'), ('size', '(96,96)')) if name in step]
        options += _small_steps(step.get('transforms', []), f'{key}.{i}.transforms')
    return options
