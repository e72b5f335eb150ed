"""convert_norms and convert_loaded on small models: exactness, order, every target, what stays and is refused."""
import copy
from collections import UserDict

import pytest
import timm
import torch
from mmdet.structures import DetDataSample
from mmengine.model import BaseModel
from mmpretrain.models.utils import LayerNorm2d
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from mmunorm import MABN, PN, UN, RepBN, convert_norms, fuse_norms, replace_norms
from mmunorm.conversion import ConversionError, ConvertedNorm, convert_loaded
from mmunorm.conversion.statistics import nearest_affine, token_sums
from mmunorm.fusion.norms import affine_of

from ..fusion.blocks import Block
from ..fusion.models import LN, detector, mmdet_swin, t2t_classifier, timm_model
from ..versions import needs_float16_layer_norm
from .models import assert_same, chain, layer_norm, norms_of, tokens
from .test_statistics import least_squares

TARGETS = [dict(type='UN'), dict(type='UN', centered=True, eta=0.5), dict(type='UN', centered='frozen'),
         dict(type='RepBN'), dict(type='MABN'), dict(type='PN', layer_scale=False)]
targets = pytest.mark.parametrize('norm_cfg', TARGETS, ids=lambda cfg: '-'.join(map(str, cfg.values())))


def reference(model, x):
    """The conversion of a `chain` with one batch, layer by layer in float64: the maps and the output."""
    maps, x = [], x.double()
    for layer in model:
        if isinstance(layer, nn.LayerNorm):
            gamma, beta = affine_of(layer)
            maps.append(nearest_affine(token_sums(x.flatten(0, -2), layer.eps), gamma, beta, 1e-7))
            x = maps[-1][0] * x + maps[-1][1]
        else:
            x = copy.deepcopy(layer).double()(x)
    return maps, x


@targets
def test_each_norm_is_fitted_after_the_converted_ones(norm_cfg):
    model, x = chain(), tokens(40, 5, 6)
    maps, expected = reference(model, x)
    linear = copy.deepcopy([layer.state_dict() for layer in model if isinstance(layer, nn.Linear)])
    convert_norms(model, x, norm_cfg)
    for norm, (a, b) in zip(norms_of(model).values(), maps, strict=True):
        assert norm.training
        scale, shift = norm.affine()
        torch.testing.assert_close(scale, a, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(shift, b, rtol=1e-4, atol=1e-5)
        assert norm.eta is None or norm.eta == 0
    torch.testing.assert_close(model.eval()(x).double(), expected, rtol=1e-4, atol=1e-4)
    for layer, before in zip((layer for layer in model if isinstance(layer, nn.Linear)), linear, strict=True):
        assert torch.equal(layer.weight, before['weight'])


def true_error(model, norm, ln, batches):
    """The error of a converted norm, from its real inputs and outputs."""
    calls = []
    norm.register_forward_hook(lambda module, args, y: calls.append((args[0], y)))
    with torch.no_grad():
        for batch in batches:
            model(batch.clone())
    x, y = map(torch.cat, zip(*calls, strict=True))
    return ((y - ln(x)).square().sum() / (ln(x) - ln.bias).square().sum()).item()


def residual(seed):
    return Block(lambda self, x: x + self.linear(self.norm(x)), dict(norm=layer_norm(6, seed), linear=nn.Linear(6, 6)))


def test_batches_are_fitted_together():
    """The second sweep leaves little of what the first batches read after norms that were fitted to few of them."""
    x = torch.cat([tokens(40, 6), 3 * tokens(40, 6, seed=1) + 1, tokens(40, 6, seed=2)])
    torch.manual_seed(0)
    model = nn.Sequential(*map(residual, range(5)))
    together = copy.deepcopy(model)
    convert_norms(model, x.split(20))
    convert_norms(together, x)
    y, expected = model.eval()(x), together.eval()(x)
    assert (y - expected).norm() < 0.002 * (expected - expected.mean(0)).norm()


def test_errors_are_those_of_the_model_that_is_returned():
    """The order of the blocks depends on the batch: the second may run before the first is fitted to all batches."""
    model = Block(lambda self, x: self.b(self.a(x)) if x[0, 0] > 0 else self.a(self.b(x)),
                  dict(a=residual(0), b=residual(1)))
    batches = tokens(2, 20, 6)
    batches[0, 0, 0], batches[1, 0, 0] = 1, -1
    norms = {name: copy.deepcopy(model.get_submodule(name)) for name in ('a.norm', 'b.norm')}
    for row in convert_norms(model.eval(), list(batches)).norms:
        true = true_error(model, model.get_submodule(row.norm), norms[row.norm], batches)
        assert row.error == pytest.approx(true, rel=1e-6)


@targets
def test_the_statistics_are_those_of_the_tokens(norm_cfg):
    model, x = chain(norms=1), tokens(40, 6)
    convert_norms(model, [x], norm_cfg)
    norm, mean, square = model[0], x.mean(0), x.square().mean(0)
    if norm.centered:
        torch.testing.assert_close(norm.running_mean, mean)
        square = square - mean.square()
    torch.testing.assert_close(norm.running_var, square)
    assert norm.activation_record is None or torch.equal(
        norm.activation_record, norm.running_var.expand_as(norm.activation_record))
    assert norm.num_batches_tracked == 0
    kinds = dict(UN=UN, RepBN=RepBN, MABN=MABN, PN=PN)
    assert isinstance(norm, kinds[norm_cfg['type']])


def test_equal_deviations_are_converted_exactly():
    x = torch.randn(30, 7)
    x = (x - x.mean(1, keepdim=True)) / x.std(1, correction=0, keepdim=True)
    model = nn.Sequential(layer_norm(7), nn.Linear(7, 7))
    expected = model(x)
    row, = convert_norms(model, [x]).norms
    torch.testing.assert_close(model.eval()(x), expected, rtol=1e-5, atol=1e-5)
    assert row.verdict == 'good' and row.cv < 1e-6 and row.error < 1e-9


def test_the_report():
    model, x = chain(), tokens(40, 6)
    ln = copy.deepcopy(model)
    report = convert_norms(model, x.split(10), keep=['4'])
    first, second, kept = report.norms
    assert [row.norm for row in report.converted] == ['0', '2'] and report.kept == (kept, ) and report.samples == 40
    sigma = (x.double().var(1, correction=0) + 1e-5).sqrt()
    cv = (sigma.std(correction=0) / sigma.mean()).item()
    assert first.cv == pytest.approx(cv, rel=1e-6)
    assert first.error == pytest.approx(first.least, rel=1e-6) and first.error > 0  # no norm is before it
    y = ln[2](model.eval()[:2](x)).double()
    a, b = model[2].affine()
    left = (y - a * model[:2](x) - b).square().sum() / (y - ln[2].bias).square().sum()
    assert second.error == pytest.approx(left.item(), rel=1e-4)
    assert kept.verdict == 'kept: requested' and kept.error is None and kept.cv > 0
    assert type(model[4]) is nn.LayerNorm

    text, markdown = str(report), report.markdown()
    assert text.startswith('2 of 3 LayerNorms converted, 1 kept, statistics of 40 samples\n')
    assert len({line.index('verdict') for line in text.splitlines() if 'verdict' in line}) == 1
    assert f'| `2` | {second.cv:.3f} |' in markdown and '||' not in markdown


@pytest.mark.parametrize('least, error, verdict', [
    (0.009, 0.01, 'good'), (0.01, 0.03, 'fair: train'), (0.04, 0.2, 'loses by those before it: train'),
    (0.06, 0.06, 'loses much by itself: train, or keep it')])
def test_verdicts(least, error, verdict):
    assert ConvertedNorm('norm', least=least, error=error).verdict == verdict


def test_a_norm_that_runs_twice_is_fitted_over_both_runs():
    norm, x = layer_norm(6), tokens(30, 6)
    model = Block(lambda self, x: self.again(self.linear(self.norm(x))),
                  dict(norm=norm, linear=nn.Linear(6, 6), unused=layer_norm(6), again=norm))
    first = x.double()
    for _ in range(2):  # at the second run, it is fitted to both
        a, b = nearest_affine(token_sums(first, 1e-5), *affine_of(model.norm), 1e-7)
        first = torch.cat([x.double(), model.linear((a * x + b).float()).detach().double()])
    report = convert_norms(model, x)
    assert model.norm is model.again and type(model.norm) is UN
    torch.testing.assert_close(model.norm.affine()[0], a, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.norm.affine()[1], b, rtol=1e-4, atol=1e-5)
    assert [(row.norm, row.kept) for row in report.norms] == [('norm', ''),
                                                              ('unused', 'did not run on these samples')]
    assert type(model.unused) is nn.LayerNorm


def layer_norm_class(name, forward):
    return type(name, (nn.LayerNorm, ), dict(forward=forward))


ln = nn.LayerNorm.forward
Masked = layer_norm_class('Masked', lambda self, x, pad_mask=None: ln(self, x))
# As VideoPrism's and Nemotron's.
OnePlusGamma = layer_norm_class('OnePlusGamma', lambda self, x: nn.functional.layer_norm(
    x, self.normalized_shape, 1 + self.weight, self.bias, self.eps))
Softmaxed = layer_norm_class('Softmaxed', lambda self, x: ln(self, x).softmax(-1))
ChannelsFirst = layer_norm_class('ChannelsFirst', lambda self, x: ln(self, x.movedim(1, -1)).movedim(-1, 1))
Conditional = layer_norm_class('Conditional', lambda self, x, residual=None, gain=1: (
    gain * ln(self, x if residual is None else x + residual)))
Halved = layer_norm_class('Halved', lambda self, x: ln(self, x)[..., ::2])


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_one_plus_gamma(dtype):
    x = tokens(40, 6).to(dtype)
    model = nn.Sequential(OnePlusGamma(6), nn.Linear(6, 6)).to(dtype)
    other = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6)).to(dtype)
    with torch.no_grad():
        model[0].weight.copy_(0.25 * torch.arange(6))
        other[0].weight.copy_(1 + model[0].weight)
    assert convert_norms(model, [x]).norms == convert_norms(other, [x]).norms
    assert_same(model[0], other[0])


NOT_LAYER_NORM = 'is a {} whose output is not that of LayerNorm over dimension -1'
OTHER_ARGUMENTS = 'is called with arguments other than x and pad_mask'


@pytest.mark.parametrize('norm, x, call, reason', [
    (Softmaxed(6), tokens(5, 7, 6), lambda norm, x: norm(x), NOT_LAYER_NORM),
    (ChannelsFirst(6), tokens(5, 6, 6), lambda norm, x: norm(x), NOT_LAYER_NORM),
    (ChannelsFirst(6), tokens(5, 6, 7), lambda norm, x: norm(x), NOT_LAYER_NORM),
    (Halved(6), tokens(5, 7, 6), lambda norm, x: norm(x).repeat(1, 1, 2), NOT_LAYER_NORM),
    (Conditional(6), tokens(5, 7, 6), lambda norm, x: norm(x, x), OTHER_ARGUMENTS),
    (Conditional(6), tokens(5, 7, 6), lambda norm, x: norm(x) + norm(x, x[:1] > 0), OTHER_ARGUMENTS),
    (Conditional(6), tokens(5, 7, 6), lambda norm, x: norm(x, residual=None), OTHER_ARGUMENTS),
    (Conditional(6), tokens(5, 7, 6), lambda norm, x: norm(x, None, 1), OTHER_ARGUMENTS),
    (Masked(6), tokens(5, 7, 6), lambda norm, x: norm(x, x[..., 0]), OTHER_ARGUMENTS),
], ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else None)
def test_norms_with_other_calls_or_formulas_are_kept(norm, x, call, reason):
    reason = reason.format(type(norm).__name__)

    def model():
        last = layer_norm(x.shape[-1])
        return Block(lambda self, x: self.last(call(self.norm, x).mean(1)), dict(norm=norm, last=last))

    alone = Block(lambda self, x: call(self.norm, x), dict(norm=norm))
    refused(f'its LayerNorm cannot be converted: norm {reason}', alone, [x])
    report = convert_norms(changed := model(), [x])
    assert [(row.norm, row.kept) for row in report.norms] == [('norm', reason), ('last', '')]
    assert changed.norm is norm and type(changed.last) is UN and report.norms[0].cv is None
    assert convert_norms(model(), [x], keep=['norm']).norms[0].kept == 'requested'


def test_a_norm_that_runs_no_more_after_the_others():
    """Which way the tokens go depends on how large they are."""
    model = Block(lambda self, x: self.second(y) if (y := self.first(x)).abs().max() < 1.1 else y,
                  dict(first=nn.LayerNorm(6), second=nn.LayerNorm(6)))
    refused('second does not run after the norms that are converted', model, [one_large_token()])


def test_padding_has_no_part():
    x, pad_mask = tokens(4, 9, 6), torch.rand(4, 9) < 0.4
    model = Block(lambda self, x, pad_mask: self.norm(x, pad_mask=pad_mask), dict(norm=Masked(6)))
    plain = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6))
    convert_norms(plain, [x[~pad_mask]])
    x[pad_mask] = 1e6
    convert_norms(model, [dict(x=x, pad_mask=pad_mask)])
    for name, value in plain[0].state_dict().items():
        torch.testing.assert_close(model.norm.state_dict()[name], value, msg=name)


def test_frozen_norms_stay_frozen_and_modes_are_kept():
    model = chain()
    model[0].requires_grad_(False)
    model[2].eval()
    model[3].eval()
    convert_norms(model, [tokens(20, 6)])
    assert not model[0].weight.requires_grad and model[2].weight.requires_grad
    assert [module.training for module in model] == [True, True, False, False, True, True]


def test_a_norm_with_an_activation_keeps_its_statistics_in_training_mode():
    model, x = nn.Sequential(timm.layers.LayerNormAct(6), *chain(norms=2)), tokens(20, 6)
    other = copy.deepcopy(model).eval()
    assert convert_norms(model, [x, 3 * x]).norms == convert_norms(other, [x, 3 * x]).norms
    assert_same(model, other)
    assert model[0].norm.training


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float64])
def test_the_dtype_of_the_model(dtype):
    model, x = chain().to(dtype), tokens(200, 6).to(dtype)
    expected = reference(model, x)[1]
    convert_norms(model, [x])
    assert {value.dtype for value in model.parameters()} == {dtype}
    y = model.eval()(x).double()
    assert (y - expected).norm() < (0.05 if dtype is torch.bfloat16 else 1e-9) * expected.norm()


@pytest.mark.parametrize('dtype', [torch.bfloat16, pytest.param(torch.float16, marks=needs_float16_layer_norm)])
def test_in_half_precision_the_error_is_that_of_the_stored_norm(dtype):
    model, x = chain(norms=1), tokens(300, 6)
    x[:, 0] += 900  # whose mean square is infinite in float16, and whose shift is rounded by far more than the fit errs
    model, x = model.to(dtype), x.to(dtype)
    ln = copy.deepcopy(model[0]).double()
    row, = convert_norms(model, [x]).norms
    expected = ln(x.double())
    error = (model[0].eval().double()(x.double()) - expected).square().sum() / (expected - ln.bias).square().sum()
    assert row.error == pytest.approx(error.item(), rel=1e-3)
    assert row.error != pytest.approx(row.least, rel=1e-2)


@needs_float16_layer_norm
def test_a_norm_beyond_the_range_of_its_dtype_is_refused():
    model, x = chain(norms=1).half(), 100 * tokens(300, 6)
    model[0].weight.data[0], x[:, 0] = 6e4, 1e3 + torch.arange(300) % 2
    before = copy.deepcopy(model)
    with pytest.raises(ConversionError, match='^0: the scale or shift that replaces it is beyond torch.float16'):
        convert_norms(model, [x.half()])
    assert_same(model, before)


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float32])
def test_what_varies_by_the_rounding_of_its_dtype_gets_no_scale(dtype):
    model, x = chain(norms=1).to(dtype), tokens(20, 6).to(dtype)
    x[:, 1] = 1
    x[::2, 1] += torch.finfo(torch.bfloat16).eps
    convert_norms(model, [x])
    assert (model[0].affine()[0] == 0).tolist() == [False, dtype is torch.bfloat16] + 4 * [False]


def test_kinds_of_batches():
    x = tokens(20, 6)
    states = []
    for batches in (x, [(x, torch.zeros(20))], iter([[x]]), [dict(input=x)], UserDict(input=x)):
        model = chain()
        torch.manual_seed(0)
        for layer in model[1::2]:
            layer.reset_parameters()
        assert convert_norms(model, batches).samples == (0 if 'input' in str(batches) else 20)
        states.append(model.state_dict())
    for state in states[1:]:
        assert all(torch.equal(value, states[0][name]) for name, value in state.items())


def test_of_a_loader_512_samples_are_read():
    loader = DataLoader(TensorDataset(torch.rand(1024, 8, 6), torch.zeros(1024)), 128, shuffle=True)
    assert convert_norms(chain(norms=1), loader).samples == 512


@pytest.mark.parametrize('given, note', [
    (torch.randn(8, 3, 32, 32), ''), (torch.rand(8, 3, 32, 32), ''),
    (torch.randint(256, (8, 3, 32, 32)).float(), 'values up to 255: normalize images as in the training of the model'),
    (torch.randn(7, 3, 32, 32), 'only 7, where a few hundred are usual')])
def test_useless_images_are_named(given, note):
    report = convert_norms(nn.Sequential(nn.Conv2d(3, 6, 4, 4), LayerNorm2d(6)), given)
    notes = [f'suspicious images: {note}'] if note else []
    assert list(report.notes) == notes
    assert str(report).splitlines()[1:2 + len(notes)] == [*notes, '']
    assert all(f'\n{note}.\n' in report.markdown() for note in notes)


@pytest.mark.parametrize('read, function', [
    (lambda norm, x: nn.functional.layer_norm(3 * x, (6, ), norm.weight, norm.bias, norm.eps), 'layer_norm'),
    (lambda norm, x: x * (1 + norm.weight), 'add'),
    (lambda norm, x: x.to(norm.weight.dtype).to(norm.weight).type_as(norm.bias) + norm.weight.new_zeros(6), '')])
def test_a_norm_whose_weight_is_read_elsewhere_stays(read, function):
    model = Block(lambda self, x: self.last(self.norm(x) + read(self.norm, x)),
                  dict(norm=layer_norm(6), last=layer_norm(6)))
    norm, x = model.norm, tokens(5, 7, 6)
    first, last = convert_norms(model, [x]).norms
    assert first.kept == (f'has a weight or bias that {function} reads outside of it' if function else '')
    assert (model.norm is norm) == bool(function) and type(model.last) is UN and not last.kept


def refused(match, model, batches, norm_cfg=None, **kwargs):
    before, state = dict(model.named_modules()), copy.deepcopy(model.state_dict())
    with pytest.raises(ConversionError, match=match):
        convert_norms(model, batches, norm_cfg or dict(type='UN'), **kwargs)
    after = dict(model.named_modules())
    assert before.keys() == after.keys() and all(before[name] is after[name] for name in before)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize('match, make, changed', [
    ('Linear has no LayerNorm or RMSNorm$', lambda: nn.Linear(6, 6), {}),
    ('is itself a LayerNorm', lambda: nn.LayerNorm(6), {}),
    ("no LayerNorm has the name 'norm' or .* names are such as '0'$", chain, dict(keep=['norm'])),
    ('keeps all LayerNorms', lambda: nn.Sequential(chain()), dict(keep=['0'])),
    ('DyT is no offline norm over tokens; take UN', chain, dict(norm_cfg=dict(type='DyT'))),
    ('UN2d is no offline norm', chain, dict(norm_cfg=dict(type='UN2d'))),
    ('PN divides every token by its own', chain, dict(norm_cfg=dict(type='PN'))),
    ('its LayerNorm cannot be converted: norm did not run on these samples',
     lambda: Block(lambda self, x: x.sum(), dict(norm=nn.LayerNorm(6))), {}),
    (r'over \(2, 6\); only .*; `keep` lets it stay', lambda: nn.Sequential(chain(), nn.LayerNorm((2, 6))), {}),
    ('batches: there is none', chain, dict(batches=[])),
    ('batches: a batch must be a tensor or a Mapping, got ndarray', chain, dict(batches=tokens(2, 3, 6).numpy())),
    ('input of 0 is not finite in the model as it is', chain, dict(batches=[tokens(3, 6), tokens(3, 6) * torch.nan])),
    ('input of 0 is not finite in the model as it is', chain, dict(batches=[tokens(3, 6), tokens(3, 6) / 0]))])
def test_errors(match, make, changed):
    refused(match, make(), **{'batches': [tokens(20, 6)], **changed})


def test_norms_over_several_dimensions_and_in_kept_modules_stay():
    model = nn.Sequential(nn.Sequential(chain(), layer_norm(6)), chain(), nn.LayerNorm((2, 6)))
    report = convert_norms(model, [tokens(4, 2, 6)], keep=['2', '0'])
    assert [row.norm for row in report.kept] == ['0.0.0', '0.0.2', '0.0.4', '0.1', '2']
    assert all(row.kept == 'requested' for row in report.kept) and len(report.converted) == 3


def one_large_token():
    """LayerNorm makes all of these tokens equally large, and a static norm does not."""
    x = torch.tensor([1., 1, 1, -1, -1, -1])[torch.stack([torch.randperm(6) for _ in range(20)])]
    x[0] *= 3
    return x


def test_activations_that_are_not_finite_after_a_static_norm():
    message = 'input of 2 is not finite after the norms that are converted'
    model = nn.Sequential(nn.LayerNorm(6), Block(lambda self, x: torch.where(x.abs() > 2, torch.inf, x), {}),
                          nn.LayerNorm(6))
    new = loaded(model)
    refused(message, model, [one_large_token()])
    before = copy.deepcopy(new.state_dict())
    for batches, why in (([one_large_token()], message), ([], 'there is none')):
        with pytest.raises(ConversionError, match=why):
            convert_loaded(new, batches)
        torch.testing.assert_close(new.state_dict(), before, rtol=0, atol=0)
        assert [norm.lacks_statistics for norm in norms_of(new).values()] == [False, True]


def test_an_interruption_restores_the_model(monkeypatch):
    model, x = chain(), tokens(20, 6)
    before = dict(model.named_modules())
    monkeypatch.setattr(UN, 'set_affine', lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        convert_norms(model, [x])
    assert before == dict(model.named_modules()) and model.training


def inputs(model, *size):
    meta = dict(img_shape=size, ori_shape=size, batch_input_shape=size, pad_shape=size, scale_factor=(1, 1))
    samples = [DetDataSample(metainfo=meta) for _ in range(2)] if hasattr(model, 'with_bbox') else None
    return dict(inputs=torch.randn(2, 3, *size), data_samples=samples)


@pytest.mark.parametrize('make, count', [
    (lambda: t2t_classifier(LN), 9), (lambda: detector(LN, mmdet_swin(LN)), 12),
    (lambda: timm_model('deit_tiny_distilled_patch16_224', None), 5)], ids=['t2t', 'mmdet_swin', 'timm_deit'])
def test_models(make, count):
    model = make().train()
    batches = [inputs(model, 32, 32) for _ in range(2)]
    if not isinstance(model, BaseModel):
        batches = [(batch['inputs'], torch.zeros(2)) for batch in batches]
    report = convert_norms(model, batches)
    assert len(report.converted) == count and not report.kept and model.training
    assert all(norm.training for norm in norms_of(model).values())
    assert len(fuse_norms(model.eval(), strict=True).folded) == count


@pytest.mark.parametrize('name, rms', [('LayerNorm2d', False), ('RmsNorm', True), ('RmsNorm2d', True),
                                       ('LayerNormAct2d', False)])
def test_other_kinds_of_norms(name, rms):
    kind = getattr(timm.layers, name)
    is_map, act = '2d' in name, 'Act' in name
    x = tokens(3, 4, 5, 6)
    norm = kind(6)
    with torch.no_grad():
        norm.weight.normal_()
    model = nn.Sequential(norm, nn.Conv2d(6, 2, 1) if is_map else nn.Linear(6, 2))
    report = convert_norms(model, [x.permute(0, 3, 1, 2) if is_map else x])
    new = model[0].norm if act else model[0]
    flat = x.flatten(0, -2).double()
    gamma, beta = affine_of(norm)
    u = flat if rms else flat - flat.mean(1, keepdim=True)
    u = u / (u.square().mean(1, keepdim=True) + norm.eps).sqrt()
    expected, error = least_squares(flat, gamma * u + beta, beta)
    torch.testing.assert_close(torch.stack(new.affine()), torch.from_numpy(expected), rtol=1e-4, atol=1e-5)
    assert report.norms[0].error == pytest.approx(error, rel=1e-3)
    assert all(module.training for module in model.modules())


def test_encoder_layers_are_converted_and_left_as_they_were_after_an_error():
    def encoder():
        return nn.TransformerEncoderLayer(6, 2, 8, batch_first=True).eval()

    x = tokens(5, 4, 6)
    model = encoder()
    assert len(convert_norms(model, [x]).converted) == 2 and type(model.norm1) is UN
    assert not model.activation_relu_or_gelu
    model = encoder()
    flag = model.activation_relu_or_gelu
    with pytest.raises(ConversionError):
        convert_norms(model, [x * torch.nan])
    assert flag and model.activation_relu_or_gelu == flag


def loaded(model, norm_cfg=TARGETS[0]):
    """The model with offline norms, and weights of `model` in it; its first norm is in no checkpoint."""
    new = replace_norms(copy.deepcopy(model), norm_cfg)
    state = {key: value for key, value in model.state_dict().items() if not key.startswith('0.')}
    new.load_state_dict(state, strict=False)
    with torch.no_grad():
        new[0].weight.fill_(1)
        new[0].bias.zero_()
    return new


@targets
def test_convert_loaded_equals_convert_norms_in_the_same_modules(norm_cfg):
    model, x = chain(), tokens(40, 5, 6)
    nn.init.ones_(model[0].weight), nn.init.zeros_(model[0].bias)  # as a fresh norm
    new = loaded(model, norm_cfg)
    new[2].eval()
    parameters, modules = list(new.parameters()), list(new.modules())
    report = convert_loaded(new, x.split(16))
    assert [norm.training for norm in norms_of(new).values()] == [True, False, True]
    assert report.norms == convert_norms(model, x.split(16), norm_cfg).norms
    assert all(a is b for a, b in zip(parameters, new.parameters(), strict=True))
    assert all(a is b for a, b in zip(modules, new.modules(), strict=True))
    assert_same(new, model)
    assert not any(norm.lacks_statistics for norm in norms_of(new).values())


def test_loaded_norms_with_statistics_stay():
    model, x = chain(), tokens(40, 6)
    new = loaded(model)
    new[2].running_var.fill_(2.)
    new[2].lacks_statistics = False
    kept = copy.deepcopy(new[2].state_dict())
    assert [norm.norm for norm in convert_loaded(new, [x]).norms] == ['0', '4']
    torch.testing.assert_close(new[2].state_dict(), kept, rtol=0, atol=0)
    with pytest.raises(ConversionError, match='no norm has the scale of a LayerNorm and no statistics'):
        convert_loaded(new, [x])


def test_loaded_norms_over_maps():
    model = nn.Sequential(LayerNorm2d(4), nn.Conv2d(4, 4, 1), LayerNorm2d(4))
    x = tokens(2, 5, 5, 4).permute(0, 3, 1, 2)
    new = loaded(model)
    convert_loaded(new, [x])
    convert_norms(model, [x])
    torch.testing.assert_close(new.eval()(x), model.eval()(x))
