"""Calls of a part of a folded model that would return other features are refused; of those that would not, none is."""
import copy
import io
import warnings
from inspect import signature
from types import SimpleNamespace

import pytest
import torch
from mmpretrain.structures import DataSample
from torch import nn
from torch.utils.checkpoint import checkpoint

from mmunorm import fuse_norms, load_folded, save_folded
from mmunorm.fusion import allow_partial_calls, streams_of
from mmunorm.fusion.scopes import held_norms

from . import models
from .blocks import Block

X = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
REFUSED = '^a part of the folded model runs without all of VisionTransformer: it may return tokens that lack a norm'
PARTS = {
    'forward_features': lambda vit: vit.forward_features(X),
    'forward_intermediates': lambda vit: vit.forward_intermediates(X),
    'get_intermediate_layers': lambda vit: vit.get_intermediate_layers(X, norm=True),
}


def vit(norm_cfg=None, **kwargs):
    model = models.timm_vit(img_size=16, norm_cfg=norm_cfg, **kwargs)
    return models.randomize(model, gamma='none')


def pickled(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def loaded(model, fresh=vit):
    save_folded(model, 'folded.pth')
    return load_folded('folded.pth', fresh())


@pytest.mark.parametrize('get, norm_cfg, rotate', [
    (copy.deepcopy, None, None), (pickled, None, 'hadamard'), (loaded, None, None), (loaded, None, 'hadamard'),
    (pickled, models.UN, None), (loaded, models.UN, None), (copy.deepcopy, models.UN, 'hadamard'),
    (lambda model: copy.deepcopy(model).half().float(), None, 'hadamard'), (nn.DataParallel, models.UN, None),
    (lambda model: torch.compile(model, backend='eager'), None, 'hadamard')])
def test_methods_that_skip_the_layers_of_a_norm_are_refused(get, norm_cfg, rotate, in_a_folder):
    folded = vit(norm_cfg)
    report = fuse_norms(folded, rotate=rotate)
    model = get(folded)
    torch.testing.assert_close(model(X), folded(X), rtol=0.02, atol=0.02)
    for call in PARTS.values():
        with pytest.raises(RuntimeError, match=REFUSED):
            call(getattr(model, 'module', model))
    model(X)  # after an error, too
    assert [stream.norms for stream in streams_of(model)] == [stream.norms for stream in report.streams]


def test_export_trace_and_script_of_a_folded_model():
    model = vit(depth=1)
    fuse_norms(model, rotate='hadamard')
    for compiled in (torch.jit.trace(model, X), torch.jit.script(model)):
        torch.testing.assert_close(compiled(X), model(X))
    with pytest.raises(RuntimeError, match=REFUSED):  # a script has no scopes, and the model still has
        model.forward_features(X)
    if 'strict' in signature(torch.export.export).parameters:  # that of torch 2.1 takes no module with hooks
        for strict in (True, False):
            torch.testing.assert_close(torch.export.export(model, (X, ), strict=strict).module()(X), model(X))


def test_a_head_that_an_option_skips_is_one():
    model = vit(models.UN, global_pool='avg')
    before = model.forward_features(X)
    fuse_norms(model, strict=True)
    torch.testing.assert_close(model.forward_features(X), before)  # its tokens are those of the model
    with pytest.raises(RuntimeError, match=REFUSED):
        model.forward_head(before, pre_logits=True)


@pytest.mark.parametrize('name', PARTS)
def test_what_an_example_calls_stays(name):
    model = vit()
    before = copy.deepcopy(model)
    fuse_norms(model, example=[X, PARTS[name]], rotate='hadamard')
    torch.testing.assert_close((model(X), PARTS[name](model)), (before(X), PARTS[name](before)), rtol=1e-4, atol=1e-4)


def outer(inner):
    return Block(lambda self, x: self.head(self.inner.forward_features(x)[:, 0]),
                 dict(inner=inner, head=nn.Linear(16, 3))).eval()


def test_the_scope_is_what_was_folded():
    """A model whose features another takes: folded alone it is refused, and together with the other it is not."""
    inner = vit(models.UN)
    together = outer(copy.deepcopy(inner))
    before = together(X)
    fuse_norms(together, example=X, strict=True)
    torch.testing.assert_close(together(X), before)
    with pytest.raises(RuntimeError, match='runs without all of Block'):
        together.inner.forward_features(X)
    fuse_norms(inner, strict=True)
    with pytest.raises(RuntimeError, match=REFUSED):
        outer(inner)(X)


def test_parts_of_other_packages():
    model = models.randomize(models.vit_classifier(models.LN), gamma='none')
    images = torch.randn(1, 3, 32, 32)
    fuse_norms(model)
    for mode in ('tensor', 'predict'):
        model(images, mode=mode)
    model(images, [DataSample().set_gt_label(0)], mode='loss')
    for part in (model.extract_feat, model.backbone, model.predict):
        with pytest.raises(RuntimeError, match='runs without all of ImageClassifier'):
            part(images)
    detector = models.randomize(models.detector(models.LN), gamma='none')
    fuse_norms(detector)
    detector.extract_feat(images)


def test_blocks_that_are_computed_again():
    model = vit(models.UN)
    fuse_norms(model, rotate='hadamard')
    model.set_grad_checkpointing()
    model.train()(X).sum().backward()
    with pytest.raises(RuntimeError, match=REFUSED):
        checkpoint(model.blocks[0], torch.randn(1, 5, 16), use_reentrant=False)


def test_later_parts_of_a_rotated_stream_are_refused_and_others_are_not():
    """Without a rotation, tokens of the stream are those of the model."""
    model, tokens = vit(), torch.randn(1, 5, 16)
    plain = copy.deepcopy(model)
    fuse_norms(plain)
    for call in (lambda net: net.blocks[1](tokens),
                 lambda net: net.forward_intermediates(X, norm=False, intermediates_only=True)):
        torch.testing.assert_close(call(plain), call(model), rtol=1e-4, atol=1e-4)
    assert not streams_of(plain)
    fuse_norms(model, rotate='hadamard')
    with pytest.raises(RuntimeError, match=REFUSED):
        model.blocks[1](tokens)


def test_parts_may_be_allowed_and_their_tokens_restored():
    model = vit()
    folded = copy.deepcopy(model)
    fuse_norms(folded, rotate='hadamard')
    allow_partial_calls(folded)
    stream, = streams_of(folded)
    tokens, expected = (net.forward_intermediates(X, norm=False, intermediates_only=True, output_fmt='NLC')
                        for net in (folded, model))
    for one, other in zip(tokens, expected, strict=True):
        torch.testing.assert_close(stream.restore(one), other - other.mean(-1, keepdim=True), rtol=1e-4, atol=1e-4)


class Normalized(models.PreTrainedModel):
    """Its last hidden state is normalized."""

    def forward(self, pixel_values, output_hidden_states=None):
        tokens = self.vit.forward_features(pixel_values)
        hidden_states = tokens if output_hidden_states or self.config.output_hidden_states else None
        return SimpleNamespace(logits=self.vit.forward_head(tokens), hidden_states=hidden_states)


@pytest.mark.parametrize('cls, kept', [(models.PreTrainedModel, []), (Normalized, ['vit.norm'])])
def test_hidden_states_of_transformers_stay_without_a_rotation(cls, kept):
    model = cls().eval()
    before = model(X, output_hidden_states=True).hidden_states
    report = fuse_norms(model, example=X)
    assert report.reduced and [fold.norm for fold in report.kept] == kept
    torch.testing.assert_close(model(X, output_hidden_states=True).hidden_states, before, rtol=1e-4, atol=1e-4)


def test_hidden_states_of_rotated_streams_are_refused(in_a_folder):
    model = models.PreTrainedModel().eval()
    before = copy.deepcopy(model)
    assert 'save_strategy' in str(fuse_norms(model, example=X, rotate='hadamard'))
    save_folded(model, 'folded.pth')
    for one in (model, load_folded('folded.pth', models.PreTrainedModel())):
        torch.testing.assert_close(one(X).logits, before(X).logits, rtol=1e-4, atol=1e-4)
        for call in (lambda one=one: one(X, output_hidden_states=True), lambda one=one: one(X)):
            with pytest.raises(RuntimeError, match='^output_hidden_states: fuse_norms has rotated these tokens'):
                call()
            one.config.output_hidden_states = True
        allow_partial_calls(one)
        one(X)


def test_save_pretrained_is_refused():
    """Because `from_pretrained` builds a model with norms, and only warns that the file has none."""
    model = models.PreTrainedModel().eval()
    fuse_norms(model, example=X, layer_norms='keep')
    assert 'save_pretrained' not in vars(model)
    fuse_norms(model, example=X)
    for one in (model, pickled(model)):
        with pytest.raises(RuntimeError, match='^save_pretrained: the model is folded.*save_folded'):
            one.save_pretrained('folder')


def pooled(self, x):
    """Returns its normalized tokens, and a layer of one of them, as transformers' models with a pooler do."""
    tokens = self.norm(self.embed(x))
    return tokens, self.pooler(tokens[:, 0])


def test_outputs_that_the_model_does_not_use_are_refused():
    part = Block(pooled, dict(embed=nn.Linear(8, 16), norm=nn.LayerNorm(16), pooler=nn.Linear(16, 4)))
    model, x = Block(lambda self, x: self.pooled(x)[1].relu(), dict(pooled=part)), torch.randn(2, 3, 8)
    before = models.randomize(model)(x)
    assert fuse_norms(model, example=x).reduced[0].where == 'pooled.pooler'
    torch.testing.assert_close(model(x), before)
    with pytest.raises(RuntimeError, match='runs without all of Block'):
        model.pooled(x)


class WithFeatures(nn.Module):
    """Has a method that does not run its forward pass, as CLIP's `get_image_features`."""

    def __init__(self):
        super().__init__()
        self.part = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16))
        self.projection, self.head = nn.Linear(16, 4), nn.Linear(4, 2)

    def features(self, x):
        return self.projection(self.part(x))

    def forward(self, x):
        return self.head(self.projection(self.part(x)).relu())


@pytest.mark.parametrize('runs_forward', [True, False])
def test_methods_that_examples_call(runs_forward):
    model, x = models.randomize(WithFeatures().eval()), torch.randn(2, 3, 8)
    before = copy.deepcopy(model)
    fuse_norms(model, example=[x] * runs_forward + [lambda model: model.features(x)])
    torch.testing.assert_close((model.features(x), model(x)), (before.features(x), before(x)))
    fuse_norms(before, example=x)
    with pytest.raises(RuntimeError, match='runs without all of WithFeatures'):
        before.features(x)


# Layers that hold a norm and are replaced.

@pytest.fixture(scope='module')
def folded():
    return models.folded_tiny_vit()


def cosine(self, x):
    return nn.functional.linear(nn.functional.normalize(x), self.weight)


@pytest.mark.parametrize('replace', [
    lambda model: model.reset_classifier(0), lambda model: model.reset_classifier(7),
    lambda model: setattr(model, 'head', nn.Linear(16, 3)),
    lambda model: setattr(model, 'head', Block(lambda self, x: x, {})),
    lambda model: setattr(model, 'head', Block(cosine, dict(weight=nn.Parameter(torch.randn(7, 16))))),
    lambda model: setattr(model, 'head', nn.Sequential(nn.Dropout(), nn.Linear(16, 3)))],
    ids=['reset_to_0', 'reset_to_7', 'other_layer', 'pass', 'cosine', 'sequential'])
@pytest.mark.parametrize('get', [copy.deepcopy, pickled, lambda model: loaded(model, models.tiny_vit)],
                         ids=['copy', 'pickled', 'loaded'])
def test_another_layer_is_a_warning_once(get, replace, folded, in_a_folder):
    model, x = get(folded), torch.randn(1, 3, 16, 16)
    assert held_norms(model) == held_norms(folded) == {
        'blocks.0.attn.qkv': ['blocks.0.norm1'], 'blocks.0.mlp.fc1': ['blocks.0.norm2'], 'head': ['norm']}
    replace(model)
    with pytest.warns(UserWarning, match=r'^head of VisionTransformer was replaced after folding\. It held the norm'):
        model(x)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        model(x)


def test_another_norm_and_a_head_that_is_replaced_one_level_higher_are_warnings():
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Sequential(nn.Linear(16, 3), nn.ReLU())).eval()
    fuse_norms(models.randomize(model), example=torch.randn(2, 8))
    for name, new, why in ((1, nn.LayerNorm(16), '1 of Sequential was replaced after folding. 2.0 still holds'),
                           (2, nn.Identity(), '2.0 of Sequential was replaced after folding')):
        twin = copy.deepcopy(model)
        twin[name] = new
        with pytest.warns(UserWarning, match=f'^{why}'):
            twin(torch.randn(2, 8))


@pytest.mark.parametrize('new', [
    lambda layer: Block(lambda self, x: self.layer(x), dict(layer=layer, other=nn.Linear(2, 2))),
    copy.deepcopy, lambda layer: copy.deepcopy(layer).double().float(),
    lambda layer: torch.ao.quantization.quantize_dynamic(nn.Sequential(layer), dtype=torch.qint8)[0]],
    ids=['wrapper', 'copy', 'double', 'quantized'])
@pytest.mark.filterwarnings('ignore::DeprecationWarning')
def test_another_form_of_the_layer_is_none(new, folded):
    model = copy.deepcopy(folded)
    model.head = new(model.head)
    with warnings.catch_warnings():
        warnings.simplefilter('error', UserWarning)
        model(torch.randn(1, 3, 16, 16))
