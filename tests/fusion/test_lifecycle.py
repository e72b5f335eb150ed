"""What is done with a folded model: copied, saved, loaded, compiled, wrapped, trained on."""

import copy

import pytest
import torch
from mmengine.model import ExponentialMovingAverage
from mmengine.runner.checkpoint import load_state_dict
from torch import nn

from mmunorm import fuse_norms
from mmunorm.fusion import FoldedNorm
from mmunorm.norms.layers import is_norm

from . import models

X = torch.randn(2, 3, 36, 44, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
ONE_STAGE = dict(embed_dims=8, depths=[2], num_heads=[2])
MAKERS = {
    'ours': models.swin_classifier,
    'mmdet': lambda: models.detector(backbone=models.mmdet_swin()),
    'timm': lambda: models.timm_model('swin_tiny_patch4_window7_224', strict_img_size=False),
}
every = pytest.mark.parametrize('make', MAKERS.values(), ids=MAKERS.keys())


def folded(make, gamma='some', seed=0):
    """A folded model, and the outputs of the unfolded one."""
    model = models.randomize(make().double(), seed, gamma)
    before = models.outputs(model, X)
    fuse_norms(model, strict=True)
    return model, before


@every
def test_twice_is_once(make):
    model, before = folded(make)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    report = fuse_norms(model, strict=True)
    assert report.folded == report.kept == ()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    models.assert_equal(models.outputs(model, X), before)


@every
@pytest.mark.parametrize('gamma', ['some', 'none'])
def test_copies_and_pickles(make, gamma, tmp_path):
    model, before = folded(make, gamma)
    models.assert_equal(models.outputs(copy.deepcopy(model), X), before)
    torch.save(model, tmp_path / 'model.pth')
    models.assert_equal(models.outputs(torch.load(tmp_path / 'model.pth', weights_only=False), X), before)


@every
@pytest.mark.parametrize('gammas', [('some', 'none'), ('none', 'some'), ('all', 'some')])
def test_a_state_dict_into_another_folded_model(make, gammas, tmp_path):
    """The padding comes with it, its marker included, whatever the other model was folded from."""
    model, before = folded(make, gammas[0])
    other, _ = folded(make, gammas[1], seed=9)
    torch.save(model.state_dict(), tmp_path / 'weights.pth')
    other.load_state_dict(torch.load(tmp_path / 'weights.pth', weights_only=True))
    models.assert_equal(models.outputs(other, X), before)


@pytest.mark.parametrize(
    'load',
    [
        lambda model, state: model.load_state_dict(state),
        lambda model, state: load_state_dict(model, state, strict=False),
    ],
)
def test_an_unfolded_checkpoint_is_refused(load):
    model, _ = folded(models.swin_classifier)
    unfolded = models.swin_classifier().double().state_dict()
    with pytest.raises(
        RuntimeError, match=r'weight: the model is folded, this checkpoint is not.*fuse_norms'
    ):
        load(model, unfolded)


def test_a_folded_checkpoint_in_an_unfolded_model():
    model, _ = folded(models.swin_classifier)
    with pytest.raises(RuntimeError, match='folded'):
        models.swin_classifier().double().load_state_dict(model.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize(
    'make',
    [
        lambda: models.classifier(models.swin_backbone(arch=ONE_STAGE, out_indices=(0,)), 8),
        lambda: models.timm_model(
            'swin_tiny_patch4_window7_224', strict_img_size=False, depths=(2,), num_heads=(2,)
        ),
    ],
    ids=['ours', 'timm'],
)
def test_compiled_before_and_after_folding(make):
    torch._dynamo.reset()
    model = models.randomize(make().double())
    before = models.outputs(model, X)

    def run(compiled):
        with torch.no_grad():
            return [compiled(X)]

    compiled = torch.compile(model, backend='aot_eager')
    models.assert_equal(run(compiled), before)
    fuse_norms(model, strict=True)
    models.assert_equal(run(compiled), before)


@pytest.mark.slow
def test_a_compiled_model_is_folded_through_its_wrapper():
    model = models.randomize(models.vit_classifier().double())
    x = X[..., :32, :32]
    before = models.outputs(model, x)
    compiled = torch.compile(model, backend='eager').eval()
    report = fuse_norms(compiled, strict=True)
    assert all(fold.norm.startswith('_orig_mod.') for fold in report.folded) and len(report.folded) == 5
    models.assert_equal(models.outputs(compiled, x), before)


@pytest.mark.parametrize(
    'wrap',
    [
        lambda model: nn.ModuleDict(dict(module=model)).eval(),
        lambda model: ExponentialMovingAverage(model, update_buffers=True).eval(),
    ],
)
def test_a_wrapped_model(wrap):
    model = models.randomize(models.swin_classifier().double())
    before = models.outputs(model, X)
    wrapped = wrap(model)
    assert len(fuse_norms(wrapped, strict=True).folded) == 11
    inner = wrapped['module'] if isinstance(wrapped, nn.ModuleDict) else wrapped.module
    models.assert_equal(models.outputs(inner, X), before)


def test_data_parallel_of_one_process(tmp_path):
    torch.distributed.init_process_group('gloo', init_method=f'file://{tmp_path}/store', rank=0, world_size=1)
    try:
        model = models.randomize(models.swin_classifier().double())
        before = models.outputs(model, X)
        wrapped = nn.parallel.DistributedDataParallel(model).eval()
        assert len(fuse_norms(wrapped, strict=True).folded) == 11
        models.assert_equal(models.outputs(wrapped, X), before)
    finally:
        torch.distributed.destroy_process_group()


@every
@pytest.mark.parametrize('gamma', ['some', 'none'])
def test_gradients_flow(make, gamma):
    """Fine-tuning: the gradient of the image is the unfolded model's, and every parameter has one."""
    unfolded = models.randomize(make().double(), gamma=gamma)
    model = copy.deepcopy(unfolded)
    fuse_norms(model, strict=True)
    gradients = []
    for each in (unfolded, model):
        x = X.clone().requires_grad_()
        out = each.extract_feat(x) if hasattr(each, 'with_bbox') else [each(x)]
        sum((y * torch.arange(y.numel()).view_as(y).cos()).sum() for y in out).backward()
        gradients.append(x.grad)
    models.assert_equal([gradients[1]], [gradients[0]], rtol=1e-8)
    without = [name for name, p in model.named_parameters() if p.grad is None and 'bbox_head' not in name]
    assert not without


@pytest.mark.parametrize('frozen', [True, False])
def test_a_new_bias_is_frozen_as_its_weight_is(frozen):
    model = models.swin_classifier(frozen_stages=0 if frozen else -1).eval()
    (merging,) = (m for m in model.modules() if isinstance(m, nn.Linear) and m.bias is None)
    assert merging.weight.requires_grad == (not frozen)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    fuse_norms(model, strict=True)
    assert merging.bias.requires_grad == (not frozen)
    after = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {name for name in after - trained if 'reduction.bias' not in name} == set()


@every
def test_dtype_and_mode_after_folding(make):
    model, before = folded(make)
    assert not any(module.training for module in model.modules())
    model.float().double()
    models.assert_equal(models.outputs(model, X), before, rtol=1e-4)
    assert sum(isinstance(module, FoldedNorm) for module in model.modules()) in (11, 12)
    assert not any(map(is_norm, model.modules()))


def test_the_model_is_not_changed_where_nothing_is_folded():
    model = models.swin_classifier(dict(type='LN')).eval()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    fuse_norms(model)
    after = model.state_dict()
    assert state.keys() == after.keys() and all(torch.equal(after[name], state[name]) for name in state)
