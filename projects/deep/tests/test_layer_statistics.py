import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from mmunorm.utils import PreflightError
from projects.deep.deep.layer_statistics import LayerStatisticsHook, read_layers
from projects.paper.paper import RecordError

from .runs import backbone_runner

HOOK = dict(type='LayerStatisticsHook', first=2, interval=3, threshold=0.05)


def train(work_dir, steps, **kwargs):
    run = backbone_runner(work_dir, steps, hooks=[HOOK], optim_wrapper=dict(optimizer=dict(type='SGD', lr=0.)),
                          **kwargs)
    run.train()
    return run


@pytest.mark.parametrize('scheme', ['PreNorm', 'SubLN'])
def test_measures_by_their_definitions(tmp_path, scheme):
    """With a rate of 0, each step can be computed again."""
    run = train(tmp_path, 6, residual_cfg=dict(type=scheme))
    record = read_layers(tmp_path)
    assert record.steps.tolist() == [1, 2, 3, 6]
    assert record.layers == ['backbone.layers.0', 'backbone.layers.1']
    batches = list(run.train_dataloader)
    for i, step in enumerate(record.steps):
        model = run.model
        values = {}
        layer = model.backbone.layers[1]
        handles = [layer.register_forward_hook(lambda *args, values=values: values.update(x=args[1][0], y=args[2])),
                   layer.ffn.layers[0].register_forward_hook(lambda *args, values=values: values.update(a=args[2]))]
        model.zero_grad()
        model(**batches[(step - 1) % len(batches)])['loss'].backward()
        gradient = math.sqrt(sum(parameter.grad.square().sum().item() for parameter in layer.parameters()))
        expected = (gradient, F.cosine_similarity(values['x'], values['y'], dim=-1).mean().item(),
                    (values['a'].abs() > 0.05).float().mean().item())
        found = [record.values[field][i, 1] for field in ('gradient', 'cosine', 'active')]
        np.testing.assert_allclose(found, expected, rtol=1e-4)
        for handle in handles:
            handle.remove()
    assert not model.backbone.layers[1]._forward_hooks  # no record exists


def test_a_resumed_run_continues_its_record(tmp_path):
    train(tmp_path, 7)
    first = read_layers(tmp_path)
    with (tmp_path / 'layers.csv').open('a') as file:
        file.write('7,backb')  # truncated by a kill
    train(tmp_path, 9, load_from=str(tmp_path / 'iter_6.pth'), resume=True)
    record = read_layers(tmp_path)
    assert record.steps.tolist() == [1, 2, 3, 6, 9]
    np.testing.assert_array_equal(record.values['cosine'][:4], first.values['cosine'])


def test_errors(tmp_path):
    with pytest.raises(ValueError, match='interval must be an int of at least 1, got 0'):
        LayerStatisticsHook(interval=0)
    run = backbone_runner(tmp_path, 1)
    run.model = torch.nn.Linear(2, 2)
    with pytest.raises(PreflightError, match='no layer of the model has a residual scheme'):
        LayerStatisticsHook().before_train(run)
    with pytest.raises(RecordError, match="train with `custom_hooks=\\[dict\\(type='LayerStatisticsHook'\\)\\]`"):
        read_layers(tmp_path)
    (tmp_path / 'layers.csv').write_text('step,layer,gradient,cosine,active\n1,a,1,2\n')
    with pytest.raises(RecordError, match='layers.csv is damaged'):
        read_layers(tmp_path)
