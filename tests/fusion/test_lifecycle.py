"""What is done with a folded model: copied, saved, loaded, compiled, wrapped, trained on."""
import copy
from functools import partial

import pytest
import torch
from mmengine.runner.checkpoint import load_state_dict
from torch import nn

from mmunorm import UN, fuse_norms
from mmunorm.fusion import FoldedNorm

from . import models
from .blocks import Block

X = torch.randn(2, 3, 36, 44, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


def folded(make, gamma='some', seed=0):
    """A folded model, and what it computes, which is what it computed before."""
    model = make()
    models.fold(model, X, gamma=gamma, seed=seed, strict=True)
    return model, models.outputs(model, X)


def test_twice_is_once():
    model, before = folded(models.swin_classifier)
    state = copy.deepcopy(model.state_dict())
    report = fuse_norms(model, strict=True)
    assert report.folded == report.kept == () and not any(module.training for module in model.modules())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert sum(isinstance(module, FoldedNorm) for module in model.modules()) == 11
    models.assert_equal(models.outputs(model.float().double(), X), before, rtol=1e-4)


def one_stage_mmdet():
    backbone = models.mmdet_swin(depths=(2, ), num_heads=(2, ), strides=(4, ), out_indices=(0, ))
    return models.detector(backbone=backbone, in_channels=[8], num_outs=1)


@pytest.mark.parametrize('make, gammas', [
    (models.one_stage_swin, ('some', 'none')), (one_stage_mmdet, ('none', 'some')),
    (models.one_stage_timm_swin, ('some', 'none'))])
def test_copies_pickles_and_state_dicts(make, gammas, tmp_path):
    """The padding comes with them, its marker included, whatever another folded model was folded from."""
    model, before = folded(make, gammas[0])
    models.assert_equal(models.outputs(copy.deepcopy(model), X), before)
    torch.save(model, tmp_path / 'model.pth')
    models.assert_equal(models.outputs(torch.load(tmp_path / 'model.pth', weights_only=False), X), before)
    other, _ = folded(make, gammas[1], seed=9)
    torch.save(model.state_dict(), tmp_path / 'weights.pth')
    other.load_state_dict(torch.load(tmp_path / 'weights.pth', weights_only=True))
    models.assert_equal(models.outputs(other, X), before)


def test_checkpoints_of_the_other_kind_are_refused():
    model, unfolded = folded(models.one_stage_swin)[0], models.one_stage_swin().double()
    for load in (nn.Module.load_state_dict, partial(load_state_dict, strict=False)):
        with pytest.raises(RuntimeError, match='weight: the model is folded, but this checkpoint is not.*fuse_norms'):
            load(model, unfolded.state_dict())
        with pytest.raises(RuntimeError, match='this checkpoint is of a folded model, but this model has norms'):
            load(unfolded, model.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize('make, through_wrapper', [
    (models.one_stage_swin, False), (models.one_stage_timm_swin, True)])
def test_compiled_before_and_after_folding(make, through_wrapper):
    torch._dynamo.reset()
    model = models.randomize(make(depth=1).double())
    before = models.outputs(model, X)
    compiled = torch.compile(model, backend='eager' if through_wrapper else 'aot_eager').eval()
    with torch.no_grad():
        models.assert_equal([compiled(X)], before)
        report = fuse_norms(compiled if through_wrapper else model, strict=True)
        assert report.folded
        models.assert_equal([compiled(X)], before)


@pytest.mark.parametrize('hold', [lambda norm: norm, lambda norm: torch.compile(norm, backend='eager')],
                         ids=['in_a_list', 'compiled'])
def test_a_norm_that_is_called_through_something_else(hold):
    model = Block(lambda self, x: self.calls[1](self.calls[0](x)), dict(norm=hold(UN(6)), layer=nn.Linear(6, 6)))
    model.calls = [model.norm, model.layer]
    # With torch 2.1 the compiled one stays.
    models.fold(model, torch.randn(2, 7, 6, dtype=torch.float64), example=torch.randn(1, 4, 6).double())


@pytest.mark.parametrize('make, images, rotate', [
    (models.swin_classifier, X, None),
    (partial(models.vit_classifier, models.LN, layer_scale_init_value=0.3), X[..., :32, :32], 'hadamard')])
def test_gradients_flow(make, images, rotate):
    """Fine-tuning: the gradient of the image is the unfolded model's, and every parameter has one."""
    unfolded = models.randomize(make().double())
    model, gradients = copy.deepcopy(unfolded), []
    report = fuse_norms(model, rotate=rotate)
    assert not report.kept and len(report.streams) == (rotate is not None)
    for net in (unfolded, model):
        x = images.clone().requires_grad_()
        y = net(x)
        (y * torch.arange(y.numel()).view_as(y).cos()).sum().backward()
        gradients.append(x.grad)
    models.assert_equal([gradients[1]], [gradients[0]], rtol=1e-8)
    assert not [name for name, p in model.named_parameters() if p.grad is None]


@pytest.mark.parametrize('frozen', [True, False])
def test_a_new_bias_is_frozen_as_its_weight_is(frozen):
    arch = dict(embed_dims=8, depths=[1, 1], num_heads=[2, 4])
    model = models.swin_classifier(arch=arch, frozen_stages=0 if frozen else -1).eval()
    merging, = (m for m in model.modules() if isinstance(m, nn.Linear) and m.bias is None)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    for module in model.modules():
        if isinstance(module, UN):
            module.bias.data.fill_(1)
    fuse_norms(model, strict=True)
    assert merging.bias.requires_grad == merging.weight.requires_grad == (not frozen)
    after = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert all('reduction.bias' in name for name in after - trained)
