import copy
import json
from functools import partial, partialmethod

import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
from torch import nn
from torch.nn import functional as F

from mmunorm.benchmark import measure, models, tasks
from mmunorm.benchmark.folding import Settings, markdown, run_benchmark, summarize
from mmunorm.deploy.graph import norms_left
from mmunorm.fusion import FoldedLayerNorm, FoldedRMSNorm
from mmunorm.norms import UN
from mmunorm.norms.layers import norm_layers

from .. import tiny_runs
from ..versions import is_one_graph

CPU = torch.device('cpu')


@pytest.fixture(scope='module')
def small(tmp_path_factory):
    """The config of a small classifier."""
    return Config.fromfile(tiny_runs.write_classifier(tmp_path_factory.mktemp('classifier'), stages=1))


@pytest.fixture(scope='module')
def detector(tmp_path_factory):
    cfg = Config.fromfile(tiny_runs.write_detector(tmp_path_factory.mktemp('detector'))[0])
    cfg.model.test_cfg.rpn.max_per_img = 40
    return cfg


# ---------------------------------------------------------------- measures

def test_peak_memory_is_that_of_live_tensors():
    x = torch.ones(256, 1024)  # 1 MiB, allocated before

    def run():
        y = x + x             # 1
        z = torch.cat([y, y])  # 3
        del y                 # 2
        w = torch.cat([z, z])  # 6
        del z                 # 4
        return w + w          # 8

    assert measure.peak_memory(run, CPU) == 8 * 2**20
    assert measure.peak_memory(lambda: x.view(-1)[3:].reshape(-1, 1), CPU) == 0
    x = torch.ones(10)  # a shared storage counts once
    assert measure.size_in_memory([x, x[2:], x.view(2, 5), torch.ones(3, dtype=torch.float64)]) == 40 + 24


def test_the_order_rotates_and_each_round_has_every_run():
    calls = []
    seconds = measure.InterleavedTimer({name: (lambda name=name: calls.append(name)) for name in 'abc'}, CPU).time(30)
    rounds = [''.join(calls[i:i + 3]) for i in range(0, 90, 3)]
    assert rounds[:3] == ['abc', 'bca', 'cab']
    for first in range(0, 30, 3):  # every run is once the first, the second and the third
        assert all(sorted(names) == ['a', 'b', 'c'] for names in zip(*rounds[first:first + 3], strict=True))
    # None always follows the same other one.
    pairs = {''.join(pair) for names in rounds for pair in zip(names, names[1:], strict=False)}
    assert pairs == {'ab', 'bc', 'ca', 'ba', 'cb', 'ac'}
    assert {name: len(values) for name, values in seconds.items()} == dict(a=30, b=30, c=30)
    timer = measure.InterleavedTimer({'a': lambda: 3., 'b': lambda: 4.}, CPU, clock=None)
    assert timer.time(2) == dict(a=[3., 3.], b=[4., 4.])


def test_a_budget_of_time_has_a_least_number_of_rounds(monkeypatch):
    timer = measure.InterleavedTimer({'a': lambda: None}, CPU)
    assert len(timer.time()['a']) == measure.ROUNDS[1]
    monkeypatch.setattr(measure, 'BUDGET_SECONDS', 0)
    assert len(timer.time()['a']) == measure.ROUNDS[0] and len(timer.time(7)['a']) == 7


def test_flops_and_norm_calls():
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4), UN(4)).eval()
    twice = nn.Sequential(model, nn.Linear(4, 8), model)
    assert measure.count(model, lambda: model(torch.ones(3, 8))) == (2, 0, 2 * 3 * (8 * 16 + 16 * 4))
    assert measure.count(twice, lambda: twice(torch.ones(1, 8)))[0] == 4
    assert not any(module._forward_hooks for module in model.modules())
    x = torch.ones(1, 2, 5, 4)
    assert measure.count(model, lambda: F.scaled_dot_product_attention(x, x, x))[2] == 2 * 2 * 2 * 5 * 5 * 4
    left = nn.Sequential(FoldedLayerNorm(4, 1e-5), FoldedRMSNorm(4, 1e-5), nn.LayerNorm(4), nn.Identity())
    assert measure.count(left, lambda: left(torch.ones(1, 4))) == (1, 2, 0)


def test_largest_difference():
    expected = [torch.tensor([1.0, -8.0]), torch.tensor([[2.0]])]
    difference = measure.largest_difference([torch.tensor([1.5, -8.0]), torch.tensor([[1.0]])], expected)
    assert difference == dict(absolute=1.0, largest_output=8.0, relative=0.125)


# ---------------------------------------------------------------- models

def test_rows_share_their_weights(small):
    rows, fusion, _ = models.build_models(small)
    kinds = {name: {type(norm) for _, norm in norm_layers(model)} for name, model in rows.items()}
    assert kinds == {'LN': {nn.LayerNorm}, 'exact': {nn.LayerNorm}, 'UN': {UN}, 'UN folded': set(), 'norm-free': set()}
    norms = [name for name, _ in norm_layers(rows['LN'])]
    assert norms_left(rows['exact']) == (norms[:1], norms[1:])  # the first one writes the stream
    assert len(fusion.folded) == len(list(norm_layers(rows['UN']))) == 4 and not fusion.kept
    un = rows['UN'].state_dict()
    for name in ('LN', 'norm-free'):
        assert all(torch.equal(un[key], value) for key, value in rows[name].state_dict().items())
    assert not any(model.training for model in rows.values())
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(rows['UN folded'](images), rows['UN'](images), rtol=1e-4, atol=1e-7)
        torch.testing.assert_close(rows['exact'](images), rows['LN'](images), rtol=1e-4, atol=1e-7)


def test_a_config_with_layer_norm_has_three_rows(small):
    """And the images have the channels of the model."""
    cfg = copy.deepcopy(small)
    cfg.model.backbone.norm_cfg, cfg.model.backbone.in_channels = dict(type='LN'), 1
    cfg.data_preprocessor = dict(num_classes=2, mean=[78.], std=[96.], to_rgb=False)
    result = run_benchmark(cfg, Settings(batch_size=1, repeat=1))
    assert [row['name'] for row in result['rows']] == ['LN', 'exact', 'norm-free']
    assert result['rows'][1]['output_difference']['relative'] < 1e-4 and result['fusion']['reduced'] == 3
    assert '- Folded: 0 of 4 norms, 3 now without weights.' in markdown(result)


def test_the_name_of_the_norm():
    cfg = Config(dict(model=dict(backbone=dict(norm_cfg=dict(type='TokenBN')))))
    assert models.norm_name(cfg) == 'TokenBN'
    del cfg.model.backbone.norm_cfg
    assert models.norm_name(cfg) == 'UN'  # the default of our backbones


@pytest.mark.slow
def test_the_heads_of_all_rows_do_the_same_work(detector, monkeypatch):
    monkeypatch.setattr(tasks, 'CANDIDATES', 10)
    rows, _, _ = models.build_models(detector)
    task = tasks.task_of(detector)
    task.load(rows['UN'], torch.randint(256, (2, 3, 60, 90), dtype=torch.uint8))
    assert task.images.shape == (2, 3, 64, 96)
    with torch.no_grad():
        before = {name: task.outputs(model) for name, model in rows.items()}
        task.equalize(list(rows.values()), before['UN'])
        notes = task.calibrate(rows['UN'], list(rows.values()))
        found = {name: task.run(model) for name, model in rows.items()}
        counted = [measure.count(model, partial(task.run, model))[:2] for model in rows.values()]
    assert counted == [(16, 0), (1, 15), (16, 0), (0, 0), (0, 0)]
    for name, folded in (('LN', 'exact'), ('UN', 'UN folded')):
        assert measure.largest_difference(before[folded], before[name])['relative'] < 1e-4
    for maps, others in zip(before['LN'], before['UN'], strict=True):
        assert not torch.allclose(maps, others, rtol=0.1)  # so that equal boxes are no accident
    expected = [sample.pred_instances for sample in found['UN']]
    assert 5 <= len(expected[0]) + len(expected[1]) <= 20
    assert f'Detections in a batch: {len(expected[0]) + len(expected[1])}, with masks.' in notes
    assert expected[0].masks.shape[1:] == (60, 90)
    for samples in found.values():
        for sample, other in zip(samples, expected, strict=True):
            torch.testing.assert_close(sample.pred_instances.bboxes, other.bboxes)
            assert torch.equal(sample.pred_instances.masks, other.masks)


# ---------------------------------------------------------------- report

def result_of(**changes):
    """A result with two rows; the changes are of the second."""
    common = dict(parameters=1000, peak_memory=4_000_000, flops=2e9, norm_calls=2, plain_calls=0)
    ln = dict(common, name='LN', seconds=[1.0, 2.0, 4.0])
    un = dict(common, name='UN', seconds=[0.5, 2.0, 1.0]) | dict(peak_memory=3_000_000, parameters=1100) | changes
    return dict(
        title='a model', notes=['Weights: random.'], settings=dict(repeat=3, batch_size=8, shape=(32, 48)),
        environment=dict(device='a chip'), fusion=dict(folded=2, reduced=0, kept=1, report='what stays'),
        rows=summarize([ln, un], 8))


def test_a_ratio_is_the_median_over_rounds():
    ln, un = result_of()['rows']
    assert ln['throughput'] == dict(median=4.0, low=3.0, high=6.0)  # of 8, 4, 2
    assert un['throughput']['median'] == 8.0 and un['latency_ms']['median'] == 1000.0
    # Within one round, speed is 2, 1 and 4 times LN's.
    assert un['to_ln']['throughput'] == dict(value=2.0, low=1.5, high=3.0)
    assert un['to_ln']['latency_ms']['value'] == 0.5
    assert un['to_ln']['peak_memory'] == 0.75 and un['to_ln']['parameters'] == 1.1
    assert ln['to_ln']['throughput']['value'] == 1.0


def test_markdown():
    text = markdown(result_of(name='UN folded', output_difference=dict(
        absolute=0.5, largest_output=10.0, relative=0.05)))
    lines = text.splitlines()
    assert lines[0] == '# a model: effect of folding' and '- Weights: random.' in lines
    assert '- Folded: 2 of 3 norms.' in lines and 'what stays' in lines
    unclear = markdown(result_of(seconds=[2.0, 1.0, 4.0]))  # 0.5, 2 and 1 times LN's speed
    assert '| no difference that this machine can show [0.750, 1.500] |' in unclear
    cells = [line for line in lines if line.startswith('|')]
    assert len({line.count('|') for line in cells}) == 1
    assert cells[-1] == ('| UN folded | 8 [6, 12] | 2.000 [1.500, 3.000] | 1000 | 3.0 (0.750x) | 0.001 (1.100x) '
                         '| 2 (1.000x) | 2 | 0.5 (0.05 of the largest output) |')


# ---------------------------------------------------------------- all of it

def test_a_whole_benchmark(small):
    settings = Settings(batch_size=2, repeat=3, amp='bf16')
    result = json.loads(json.dumps(run_benchmark(small, settings, title='tiny')))
    assert settings.shape is None  # it is the caller's
    assert result['title'] == 'tiny' and result['settings']['shape'] == [32, 32]
    assert result['settings']['amp'] == 'bf16' and result['settings']['repeat'] == 3
    assert 'autocast to bf16' in ' '.join(result['notes']) and 'random statistics' in result['notes'][0]
    assert result['environment']['versions']['torch'] == torch.__version__
    by_name = {row['name']: row for row in result['rows']}
    assert [row['norm_calls'] for row in by_name.values()] == [4, 1, 4, 0, 0]
    assert [row['plain_calls'] for row in by_name.values()] == [0, 3, 0, 0, 0]
    assert len({row['flops'] for row in by_name.values()}) == 1
    for row in by_name.values():
        assert len(row['seconds']) == 3
        images = 2 * 3 * 32 * 32 * 4
        assert row['peak_memory'] > 4 * row['parameters'] + images
        assert row['throughput']['median'] == pytest.approx(2 / np.median(row['seconds']))
    affine = sum(norm.weight.numel() for _, norm in norm_layers(models.build_models(small).rows['UN']))
    assert by_name['UN']['parameters'] - by_name['norm-free']['parameters'] == 2 * affine
    for name in ('exact', 'UN folded'):
        assert 0 < by_name[name]['output_difference']['relative'] < 0.1
    assert '| 1, 3 without weights |' in markdown(result)


def test_the_papers_settings(small, detector):
    paper = Settings.of_the_paper(small, device='cuda:0')
    assert (paper.batch_size, paper.shape, paper.repeat, paper.device) == (512, (224, 224), 1000, 'cuda:0')
    paper = Settings.of_the_paper(detector, batch_size=1, repeat=None)
    assert (paper.batch_size, paper.shape, paper.repeat) == (1, (800, 1333), 1000)


@pytest.mark.slow
def test_compiled(small, monkeypatch):
    monkeypatch.setattr(nn.Module, 'compile', partialmethod(nn.Module.compile, backend='eager'))
    result = run_benchmark(small, Settings(batch_size=2, repeat=2, compile=True))
    assert [row['norm_calls'] for row in result['rows']] == [4, 1, 4, 0, 0]
    assert any(note.startswith('Compiled with torch.compile: the whole model') for note in result['notes'])


def test_the_t2t_backbone_compiles_into_one_graph():
    init_default_scope('mmpretrain')
    settings = dict(img_size=32, embed_dims=24, t2t_cfg=dict(token_dims=8), num_layers=1,
                    layer_cfgs=dict(num_heads=2, feedforward_channels=24), drop_path_rate=0.1)
    stock, model = (MODELS.build(dict(settings, type=name)).eval() for name in ('T2T_ViT', 'UNT2TViT'))
    x = torch.randn(1, 3, 32, 32)
    compiled = torch.compile(model, backend='eager', fullgraph=is_one_graph(stock, x))
    with torch.no_grad():
        torch.testing.assert_close(compiled(x)[0], model(x)[0])
