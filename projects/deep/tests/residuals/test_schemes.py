"""Each scheme against its formula, and the properties that distinguish the schemes."""
import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from .models import IMAGES, SCHEMES, WITHOUT_NORM, embed, randomize, reference, vit


def gradients(model, output):
    """The gradient of every parameter, by name; all must have one."""
    model.zero_grad()
    output.square().sum().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def assert_close(actual, expected, rtol=1e-11):
    torch.testing.assert_close(actual, expected, rtol=0, atol=rtol * max(1, expected.abs().max().item()))


@pytest.mark.parametrize('depth', [1, 3])
@pytest.mark.parametrize('scheme', SCHEMES)
def test_equals_its_formula_forward_and_backward(scheme, depth):
    model = randomize(vit(scheme, depth))
    if scheme == 'BranchNorm':
        model.update_clock.updates.fill_(1300)
    images = torch.randn(IMAGES, dtype=torch.float64)
    output = model(images)[0]
    expected = reference(model, scheme, images, branch_weight=1300 / 4000)
    assert_close(output, expected)
    actual = gradients(model, output)
    for name, gradient in gradients(model, expected).items():
        assert_close(actual[name], gradient, 1e-9)


@pytest.mark.parametrize('scheme, norm', [
    (scheme, norm) for scheme in SCHEMES if scheme not in WITHOUT_NORM
    for norm in ('UN', 'NoNorm') if (scheme, norm) != ('ResPostNorm', 'NoNorm')])
def test_every_scheme_trains_with_every_norm(scheme, norm):
    model = vit(scheme, 2, norm).train()
    for _ in range(2):
        gradient = gradients(model, model(torch.randn(IMAGES))[0])
        assert all(value.isfinite().all() for value in gradient.values())


@pytest.mark.parametrize('schedule', ['linear', 'sigmoid'])
def test_branch_norm_at_0_has_no_gradient_in_its_branches_and_at_t_is_post_norm(schedule):
    branch = vit(dict(type='BranchNorm', warmup_iters=50, schedule=schedule), 3).train()
    nn.init.normal_(branch.cls_token)
    post = vit('PostNorm', 3).train()
    post.load_state_dict({k: v for k, v in branch.state_dict().items() if 'update_clock' not in k})
    images = torch.randn(IMAGES)
    for name, gradient in gradients(branch, branch(images)[0]).items():
        if '.attn.' in name or '.ffn.' in name:
            assert not gradient.any(), name
    assert gradients(branch, branch(images)[0])['layers.0.ln1.weight'].any()
    for updates in (50, 51, 10**9):
        branch.update_clock.updates.fill_(updates)
        assert torch.equal(branch(images)[0], post(images)[0])
        expected = gradients(post, post(images)[0])
        for name, gradient in gradients(branch, branch(images)[0]).items():
            assert torch.equal(gradient, expected[name]), name
    branch.update_clock.updates.fill_(49)
    assert not torch.equal(branch(images)[0], post(images)[0])


@settings(max_examples=8, deadline=None)
@given(depth=st.sampled_from([1, 2, 8]), seed=st.integers(0, 1000))
def test_deep_norm_is_branch_norm_frozen_at_its_inverse(depth, seed):
    """LN(a x + F) = LN(x + F / a), where LN's eps does not matter."""
    norm_cfg = dict(type='LN', eps=1e-30)
    deep = randomize(vit('DeepNorm', depth, norm_cfg=norm_cfg), seed)
    steps = 2**20
    branch = vit(dict(type='BranchNorm', warmup_iters=steps), depth, norm_cfg=norm_cfg).double().eval()
    branch.load_state_dict({**deep.state_dict(), 'update_clock.updates': torch.tensor(0)})
    branch.update_clock.updates.fill_(round(steps / (2 * depth)**0.25))
    images = torch.randn(IMAGES, dtype=torch.float64)
    torch.testing.assert_close(branch(images)[0], deep.eval()(images)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize('residual', ['ReZero', 'SkipInit', 'ResPostNorm', dict(type='LayerScale', init_value=0.)])
def test_starts_as_the_identity(residual):
    model = vit(residual, 3)
    model.init_weights()
    images = torch.randn(IMAGES)
    x = embed(model, images)
    for layer in model.layers:
        assert torch.equal(layer(x), x)


@pytest.mark.parametrize('scheme, word, names', [
    ('ReZero', 'gain', ['layers.0.residual1.gain', 'layers.1.residual1.gain']),
    ('SkipInit', 'gain', [f'layers.{i}.residual{j}.gain' for i in (0, 1) for j in (1, 2)]),
    ('BranchNorm', 'clock', ['update_clock.updates']), ('DeepNorm', 'clock', [])])
def test_shared_state_is_saved_once(scheme, word, names):
    assert [name for name in vit(scheme, 2).state_dict() if word in name] == names


@pytest.mark.parametrize('scheme, name', [
    ('ReZero', 'layers.0.residual1.gain'), ('BranchNorm', 'update_clock.updates')])
def test_a_copied_model_is_independent(scheme, name):
    """References between modules that are not children are copied with the model."""
    model = vit(scheme, 1).eval()
    other = copy.deepcopy(model)
    other.state_dict()[name].fill_(4000)
    x = torch.randn(1, 3, 8)
    assert not torch.equal(model.layers[0](x), other.layers[0](x))
    other.load_state_dict(model.state_dict())
    assert torch.equal(model.layers[0](x), other.layers[0](x))


def test_dlcl_starts_with_means_of_all_earlier_outputs():
    model = vit('DLCL', 3).eval()
    weights = [(name, value) for name, value in model.named_parameters() if 'residual' in name and 'norm' not in name]
    assert [name for name, _ in weights] == [
        'layers.0.residual1.weight', 'layers.1.residual1.weight', 'layers.2.residual1.weight',
        'layers.2.residual2.weight']
    for number, (_, value) in enumerate(weights, start=1):
        torch.testing.assert_close(value, torch.full((number, ), 1 / number))
    model(torch.randn(IMAGES))
    copy.deepcopy(model)  # of a graph, torch makes no copies


def test_dlcl_refuses_layers_out_of_order():
    model = vit('DLCL', 3)
    x = torch.randn(1, 3, 8)
    with pytest.raises(RuntimeError, match='DLCL: layers must be run in their order'):
        model.layers[1](x)
    model.layers[0](x)
    with pytest.raises(RuntimeError, match='3 outputs are mixed here, and there are 2'):
        model.layers[2](x)
    model(torch.randn(IMAGES))


@pytest.mark.parametrize('scheme', sorted(set(SCHEMES) - {'DLCL'}))
def test_stochastic_depth_drops_the_whole_branch(scheme):
    model = vit(scheme, 2, drop_path_rate=0.999999).train()
    last = model.layers[1]
    x = torch.randn(4, 5, 8)
    for connection, part, norm in ((last.residual1, last.attn, last.ln1), (last.residual2, last.ffn, last.ln2)):
        a = connection.scales()[0]
        expected = x if a is None else a * x
        expected = norm(expected) if connection.norm_at == 'post' else expected
        assert torch.equal(connection(x, part, norm), expected)
