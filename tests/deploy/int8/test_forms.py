"""Which form a norm gets, and that either form is the same function."""
import copy
from dataclasses import replace

import pytest
import torch

from mmunorm.deploy.graphs import graph_of
from mmunorm.deploy.int8 import Samples, apply_forms, choose_forms, forms_table
from mmunorm.deploy.int8.forms import ScaleShift
from mmunorm.deploy.int8.simulate import simulate, trained_weights
from mmunorm.errors import PreflightError
from mmunorm.fusion import fuse_norms
from mmunorm.norms.layers import norm_layers

from . import models

FIRST = 'backbone.stages.0.blocks.0.norm1'


@pytest.fixture(scope='module')
def forms():
    """Of a model whose channels are alike, and of one in which two are large."""
    return {spread: {form.norm: form for form in choose_forms(models.classifier(spread), models.samples())}
            for spread in (1., 100.)}


def test_norms_in_front_of_a_layer_are_measured(forms):
    names = [name for name, _ in norm_layers(models.classifier())]
    # The norm behind the patch embedding has no reader whose input it could equalize.
    assert list(forms[1.]) == [name for name in names if name != 'backbone.patch_embed.norm']
    assert forms[1.][FIRST].readers == ('backbone.stages.0.blocks.0.attn.w_msa.qkv', )


def test_a_norm_stays_where_channels_differ(forms):
    alike, differ = forms[1.][FIRST], forms[100.][FIRST]
    assert differ.spread > 10 * alike.spread
    assert differ.form == 'kept' and differ.kept > differ.folded + 15
    assert abs(alike.kept - alike.folded) < 10


@pytest.mark.parametrize('form', ['kept', 'folded', 'chosen'])
def test_either_form_is_the_same_function(forms, form):
    model = models.classifier(100.)
    images = models.pictures(2).float()
    with torch.no_grad():
        before = graph_of(model)(images)
    chosen = [replace(each, kept=float(form == 'kept'), folded=float(form == 'folded')) if form != 'chosen' else each
              for each in forms[100.].values()]
    report = apply_forms(model, chosen)
    kept = [each.norm for each in chosen if each.form == 'kept']
    assert [name for name, module in model.named_modules() if isinstance(module, ScaleShift)] == kept
    assert not report.kept and not list(norm_layers(model)) and len(report.folded) + len(kept) == len(chosen) + 1
    with torch.no_grad():
        torch.testing.assert_close(graph_of(model)(images), before, rtol=0, atol=1e-5)


def test_the_model_is_left_as_it_is(forms):
    model = models.classifier()
    before = copy.deepcopy(model.state_dict())
    assert choose_forms(model, models.samples()) == list(forms[1.].values())  # and the same each time
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_layer_norms_leave_nothing_to_choose():
    assert choose_forms(models.classifier(norm_cfg=dict(type='LN')), models.samples()) == []


def test_norms_in_the_stream_are_folded_as_they_are():
    model = models.classifier(residual_cfg=dict(type='PostNorm'))
    images = models.pictures(2).float()
    with torch.no_grad():
        before = graph_of(model)(images)
    forms = choose_forms(model, models.samples())
    assert not any('blocks' in form.norm for form in forms)
    assert not apply_forms(model, forms).kept and not list(norm_layers(model))
    with torch.no_grad():
        torch.testing.assert_close(graph_of(model)(images), before, rtol=0, atol=1e-5)


def test_the_table(forms):
    lines = forms_table(list(forms[100.].values())).splitlines()
    assert lines[2].startswith(f'| `{FIRST}` | ') and lines[2].endswith('| kept |')
    assert len(lines) == 2 + len(forms[100.])


def test_simulated_bits():
    """Eight cost little, four much, and the model is left as it is."""
    model = models.classifier()
    images = models.pictures(4, seed=1).float()
    with torch.no_grad():
        exact = graph_of(model)(images).log()
        errors = [(graph_of(simulate(model, models.samples(), bits))(images).log() - exact).abs().mean()
                  for bits in (8, 4)]
        assert torch.equal(graph_of(model)(images).log(), exact)
    assert 0 < errors[0] < 0.05 and errors[1] > 5 * errors[0]


def test_samples():
    pictures = list(models.pictures(7))
    batches = Samples(pictures, lambda part: (torch.stack(list(part)).numpy(), ), 3)
    assert len(batches) == 2 and [batch[0].shape for batch in batches] == [(3, 3, *models.SHAPE)] * 2
    assert batches[1][0].dtype == 'float32'
    with pytest.raises(PreflightError, match='got 7 for --batch 8'):
        Samples(pictures, lambda part: part, 8)


def test_a_model_that_learns_its_rounding():
    model = models.classifier().requires_grad_(True)
    fuse_norms(model)
    images = models.pictures(2).float()
    student = simulate(model, models.samples(), 6, trainable=True)
    scores = graph_of(student)(images)
    torch.testing.assert_close(scores, graph_of(simulate(model, models.samples(), 6))(images))
    (scores - graph_of(model)(images).detach()).square().sum().backward()
    layer = 'backbone.stages.0.blocks.0.ffn.layers.1'
    gradient = student.get_submodule(layer).parametrizations.weight.original.grad
    assert gradient.isfinite().all() and gradient.abs().max() > 0

    with torch.no_grad():
        student.get_submodule(layer).parametrizations.weight.original += 1
    weights = trained_weights(student)
    before = model.state_dict()
    torch.testing.assert_close(weights.pop(f'{layer}.weight'), before.pop(f'{layer}.weight') + 1)
    assert weights.keys() == before.keys() and all(torch.equal(weights[name], before[name]) for name in before)
