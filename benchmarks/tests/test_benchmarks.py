"""The benchmarks run, and print a row for each measurement; what sync_cost.py counts is what norms communicate."""
import importlib
import json
import re

from mmunorm import export
from mmunorm.cli.arguments import load_config
from mmunorm.deploy.graph import Pixels
from mmunorm.engine import calibration
from mmunorm.norms import UN, RepBN, convert_sync
from tests import tiny_runs

import numpy as np
import pytest
import torch
from mmengine.registry import MODELS
from mmpretrain.registry import TRANSFORMS
from PIL import Image
from tests.versions import needs_fused_adamw
from torch import nn
from torchvision.transforms.functional import normalize, to_tensor


@pytest.fixture
def script(monkeypatch):
    """The module of `benchmarks/NAME.py`."""
    monkeypatch.syspath_prepend(tiny_runs.ROOT / 'benchmarks')
    return importlib.import_module


@pytest.fixture
def chips(script):
    pytest.importorskip('onnx')
    return script('chips_time')


@pytest.fixture
def run(script, tmp_path, capsys):
    """What `benchmarks/NAME.py` prints, and the rows it writes."""
    def call(name, *arguments):
        script(name).main(['--out', str(tmp_path), '--threads', '1', '--rounds', '1', *arguments])
        file, = tmp_path.glob(f'{name}_*.jsonl')
        return capsys.readouterr().out, [json.loads(line) for line in file.read_text().splitlines()]

    return call


def test_tiny_layer(run):
    printed, rows = run('tiny_layer')
    assert [row['norm'] for row in rows] == ['LayerNorm', 'BatchNorm', 'UN', 'UN in warm-up']
    assert 'UN: ' in printed and rows[0]['calls'] < rows[2]['calls'] <= 160


@pytest.mark.slow
def test_norm_layers(run):
    norms = ['UN', 'TokenBN', 'BatchNorm', *['RMSNorm'] * hasattr(nn, 'RMSNorm')]
    printed, rows = run('norm_layers', '--norms', *norms, '--modes', 'eager', '--batch', '1', '--dtypes', 'float32')
    assert '(1, 3136, 96)' in printed and 'UN / LN' in printed
    assert {(row['norm'], row['shape'][1]) for row in rows} == {
        (norm, tokens) for norm in ('LayerNorm', *norms) for tokens in (3136, 784, 196, 49)}
    assert all(row['to_ln']['value'] > 0 and row['peak_memory_to_ln'] > 0 for row in rows)


@needs_fused_adamw
@pytest.mark.slow
def test_residual_step(run):
    printed, rows = run('residual_step', '--models', 'digits, 48 layers', '--norms', 'LN', '--batch', '1')
    assert 'LN, BranchNorm' in printed
    assert [row['scheme'] for row in rows] == ['PostNorm', 'DeepNorm', 'BranchNorm', 'PreNorm']
    assert all(row['to_post_norm']['value'] > 0 for row in rows)


def test_shifted_light(script, tmp_path):
    config, checkpoint, _ = tiny_runs.untrained_classifier(tmp_path)
    light = script('shifted_light')
    light.main(['--models', f'UN={config}:{checkpoint}:{checkpoint}', '--out', str(tmp_path / 'out')])
    rows = [json.loads(line) for line in (tmp_path / 'out/shifted_light.jsonl').read_text().splitlines()]
    assert [(row['seed'], row['form']) for row in rows] == [(seed, form) for seed in (0, 1) for form in light.LIGHT]
    cfg = load_config(str(config))
    (usual, ), (dark, ) = (calibration.test_images(light.shifted(cfg, factors), 1)
                           for factors in ({}, dict(brightness=0.4)))
    assert usual.float().mean() > 10 and (dark - 0.4 * usual).abs().max() <= 1


def test_the_signal_through_initial_weights(script, tmp_path, capsys):
    script('initial_signal').main(
        ['--layers', '3', '--width', '64', '--samples', '8', '--out', str(tmp_path / 'a.png')])
    assert min(Image.open(tmp_path / 'a.png').size) > 500
    left = {name: float(value) for name, value in re.findall('(.*): ([0-9.e-]+)\n', capsys.readouterr().out)}
    assert left["torch's own, ReLU"] < 0.1 and 0.3 < left['He, ReLU'] < 3 and 0.7 < left['SecondMoment, SELU'] < 1.4


@pytest.mark.slow
def test_the_model_zoo_resumes(script, tmp_path, monkeypatch):
    zoo = script('model_zoo')
    monkeypatch.setattr(zoo, 'TIMM', {'convnext_atto': (32, dict(depths=(1, 1, 1, 1), dims=(8, 8, 8, 8))), 'none': 32})
    paths = ['--results', str(tmp_path / 'rows.jsonl'), '--page', str(tmp_path / 'page.md')]
    zoo.main(['--only', 'timm', *paths])
    rows = {row['model']: row for row in map(json.loads, (tmp_path / 'rows.jsonl').read_text().splitlines())}
    row = rows['timm: convnext_atto']
    assert (row['norms'], row['replaced'], row['folded'], row['kept']) == (9, 9, 9, [])
    assert row['difference'] < 1e-12
    assert 'Unknown model' in rows['timm: none']['error']
    monkeypatch.setattr(zoo, 'measure', None)  # all rows are there
    zoo.main(['--only', 'timm', '--page', str(tmp_path / 'page.md'), *paths[:2]])
    text = ' '.join((tmp_path / 'page.md').read_text().split())
    assert '9 of 9 norms fold.' in text and '1 models did not run' in text
    assert '## A part of the LayerNorms folds | model ' in text and '## Models that did not run | model ' in text


@pytest.mark.parametrize('norm', [UN, RepBN])
def test_bytes_are_those_that_a_norm_communicates(norm, script, monkeypatch):
    sent = []
    monkeypatch.setattr('torch.distributed.is_initialized', lambda: True)
    monkeypatch.setattr('torch.distributed.get_world_size', lambda: 2)
    monkeypatch.setattr('torch.distributed.all_reduce', sent.append)
    layer = convert_sync(norm(10))
    layer(torch.randn(3, 4, 10, requires_grad=True)).sum().backward()
    assert len(sent) == 2
    assert sum(values.numel() * values.element_size() for values in sent) == script(
        'sync_cost').bytes_per_step(layer)


def test_the_vit_receives_what_torchvision_makes_of_a_photograph(script, tmp_path):
    for package in ('onnx', 'onnxruntime', 'timm'):
        pytest.importorskip(package)
    photograph = np.random.default_rng(0).integers(0, 256, (256, 256, 3), dtype=np.uint8)
    Image.fromarray(photograph).save(tmp_path / 'a_0.png')
    of_timm, real_vit = script('adapt_vit'), script('real_vit')
    mean, std = (value.flatten().tolist() for value in (of_timm.MEAN, of_timm.STD))
    crops, _ = of_timm.load_crops(tmp_path)
    wanted = normalize(to_tensor(photograph[16:240, 16:240]), mean, std)[None]
    torch.testing.assert_close(of_timm.normalized(crops), wanted)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 14, 14), torch.nn.Flatten()).eval()
    export(model, wanted, tmp_path / 'm.onnx', mean=mean, std=std)
    torch.testing.assert_close(real_vit.InFile(tmp_path / 'm.onnx')(wanted), model(wanted), rtol=0, atol=1e-5)


def test_a_network_receives_what_torchvision_makes_of_a_file(tmp_path):
    """From a config's own pipeline, which reads BGR."""
    photograph = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    Image.fromarray(photograph).save(tmp_path / 'a.png')
    cfg = load_config(str(tiny_runs.ROOT / 'configs/swin_t_un_imagenet.py'))
    wanted = normalize(to_tensor(photograph), (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))[None]
    data = dict(img_path=str(tmp_path / 'a.png'), gt_label=0)
    for step in cfg.test_dataloader.dataset.pipeline:
        if step.type.endswith(('LoadImageFromFile', 'PackInputs')):
            data = TRANSFORMS.build(step)(data)
    preprocessor = MODELS.build(dict(cfg.data_preprocessor, type='mmpretrain.ClsDataPreprocessor'))
    inputs = preprocessor(dict(inputs=data['inputs'][None]), False)['inputs']
    torch.testing.assert_close(inputs, wanted, rtol=0, atol=1e-3)
    torch.testing.assert_close(Pixels(preprocessor)(data['inputs'][None].float()), inputs)


PROFILE = """ENGINE_BD                    ENGINE_GDMA
                             Load_1|GDMA_TENSOR|s:0|b:0|g:1|e:9|t:10|dr:0|sz:64|bw:22.79
Conv_2|AR|s:10|b:1|g:1|e:29|t:20  Load_3|GDMA_TENSOR|s:10|b:0|g:2|e:39|t:30|dr:0|sz:64|bw:22.79
LayerNorm_4|AR|s:35|b:2|g:2|e:49|t:15
API_END total_cycle:52|b:2|g:3
GDMA SUMMARY : |dr[0] S2L:1048576|dr[1] L2S:524288|dr[2] S2S:0|dr[3] L2L:0
flops: 9, runtime: 0.000050ms, ComputationAbility: 2.0T
"""


def test_cycles_of_operators_add_up_to_the_total(chips):
    row = chips.read_profile(PROFILE)
    assert (row['ms'], row['cycles'], row['megabytes']) == (5e-5, 52, 1.5)
    # 5 cycles in which only memory moves between the two operators; the last two have no operator
    assert row['by_operator'] == {'Conv': 20, 'Load': 15, 'LayerNorm': 15}


def test_the_operators_of_rockchip(chips):
    line = 'D RKNN: [17:01:26.885] {}  {}  INT8  NPU  (1,96,56,56),(1,96,1,1)  (1,96,56,56)  0/0/0  {}  name'
    table = ['Network Layer Information Table', line.format(0, 'Conv', 2048), line.format(1, 'exNorm', 512),
             line.format(2, 'exNorm', 512), 'SNR: 31.5 dB']
    row = chips.read_layers('\n'.join(table))
    assert row['operators'] == {'exNorm': 2, 'Conv': 1}
    assert (row['megabytes'], row['snr']) == (3, 31.5)


def test_a_failing_compiler_is_a_row_and_rows_are_kept(chips, monkeypatch, tmp_path):
    monkeypatch.setattr(chips, 'ROOT', tmp_path)
    binaries = tmp_path / '.venv-sophgo/bin'
    binaries.mkdir(parents=True)
    (binaries / 'model_transform').write_text('#!/bin/sh\necho start\necho "UNREACHABLE executed at /a/b/C.cpp:4!"\n'
                                              'exit 134\n')
    (binaries / 'model_transform').chmod(0o755)
    monkeypatch.setattr(chips, 'write_network', lambda *_: None)
    args = chips.parse_args(['--networks', 'DeiT-S', '--chips', 'BM1688', '--precisions', 'F16'])
    rows = list(chips.new_rows(args, {('DeiT-S', 'UN', 'BM1688', 'F16')}))
    assert rows == [dict(network='DeiT-S', norm='LN', chip='BM1688', precision='F16', compiler='tpu_mlir 1.30.2',
                         error='UNREACHABLE executed at C.cpp:4!')]


def test_rows_of_files_for_chips(script, monkeypatch, tmp_path):
    """Missing rows alone are measured; what a compiler says is in the row, without paths of this machine."""
    pytest.importorskip('onnx')
    chips = script('chips')
    from mmunorm.deploy.formats.chip import Chip
    from mmunorm.deploy.formats.onnx import OnnxSession, write_onnx
    from mmunorm.deploy.vendors.process import Vendor
    from mmunorm.utils import PreflightError

    class Simulated(Chip):
        name, suffixes, in_file = 'simulated', ('.sim', ), True
        vendor = Vendor('simulated', 'numpy', 'numpy 2')

        def compile(self, model, path, images, int8, options):
            assert len(list(images)) == 3 * int8
            if options:
                raise PreflightError('E: no KL; all that it printed: /tmp/a.log')
            write_onnx(model, path)
            return self.load(path, None)

        def load(self, path, threads):
            return OnnxSession(path, threads)

        def facts(self, path):
            return dict(ms=1.5)

    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 4, 16, 16), nn.Flatten(), nn.Linear(784, 5)).eval()
    monkeypatch.setitem(chips.FORMATS, 'rknn', Simulated())
    monkeypatch.setattr(chips, 'models', lambda *_: (network, None))
    for split in ('train', 'test'):
        (tmp_path / split).mkdir()
        for index in range(3):
            Image.effect_noise((256, 256), 20 + index).convert('RGB').save(tmp_path / f'{split}/{index}.png')
    call = ['--networks', 'DeiT-S', 'ViT-S', '--chips', 'RK3588', '--crops', f'noise={tmp_path}', '--out',
            str(tmp_path / 'rows.jsonl')]
    for cures in (['', 'F16'], ['', 'F16', 'KL']):
        chips.main([*call, '--cures', *cures])
    rows = [json.loads(line) for line in (tmp_path / 'rows.jsonl').read_text().splitlines()]
    assert [(row['form'], row['cure']) for row in rows] == [
        ('LN', ''), ('LN', 'F16'), ('exact', ''), ('exact', 'F16'), ('LN', 'KL'), ('exact', 'KL')]
    assert all(row['snr'] > 90 and row['ms'] == 1.5 and row['images_tested'] == 3 for row in rows[:4])
    assert rows[4]['error'] == 'E: no KL'
