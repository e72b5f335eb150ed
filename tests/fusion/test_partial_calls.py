"""Calls of a part of a folded model that would return other features are refused; of those that would not, none is."""
import copy
import functools
import io
import warnings
from types import SimpleNamespace

import pytest
import torch
from mmpretrain.structures import DataSample
from torch import nn
from torch.utils.checkpoint import checkpoint

from mmunorm import fuse_norms, load_folded, save_folded
from mmunorm.fusion import allow_partial_calls, streams_of

from . import models

X = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
REFUSED = r'^VisionTransformer\.{} runs a part of a folded model: it may return tokens that lack a norm'
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


def loaded(model):
    save_folded(model, 'folded.pth')
    return load_folded('folded.pth', vit())


@pytest.mark.parametrize('get', [
    copy.deepcopy, pickled, loaded, lambda model: copy.deepcopy(model).half().float(), nn.DataParallel,
    lambda model: torch.compile(model, backend='eager')],
    ids=['copy', 'pickled', 'loaded', 'half', 'parallel', 'compiled'])
@pytest.mark.parametrize('norm_cfg, rotate', [(None, None), (None, 'hadamard'), (models.UN, None),
                                              (models.UN, 'random')], ids=['LN', 'LN_rotated', 'UN', 'UN_rotated'])
def test_methods_that_skip_the_layers_of_a_norm_are_refused(get, norm_cfg, rotate, in_a_folder):
    folded = vit(norm_cfg)
    report = fuse_norms(folded, rotate=rotate)
    model = get(folded)
    torch.testing.assert_close(model(X), folded(X), rtol=0.02, atol=0.02)
    for name, call in PARTS.items():
        with pytest.raises(RuntimeError, match=REFUSED.format(name)):
            call(getattr(model, 'module', model))
    assert [stream.norms for stream in streams_of(model)] == [stream.norms for stream in report.streams]


def test_a_head_that_an_option_skips_is_one():
    model = vit(models.UN, global_pool='avg')
    before = model.forward_features(X)
    fuse_norms(model, strict=True)
    torch.testing.assert_close(model.forward_features(X), before)  # its tokens are those of the model
    with pytest.raises(RuntimeError, match=REFUSED.format('forward_head')):
        model.forward_head(before, pre_logits=True)


@pytest.mark.parametrize('name', PARTS)
def test_what_an_example_calls_stays(name):
    model = vit()
    before = copy.deepcopy(model)
    fuse_norms(model, example=[X, PARTS[name]])
    torch.testing.assert_close((model(X), PARTS[name](model)), (before(X), PARTS[name](before)), rtol=1e-4, atol=1e-4)


class Outer(nn.Module):

    def __init__(self, inner):
        super().__init__()
        self.inner, self.head = inner, nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.inner.forward_features(x)[:, 0])


def test_the_scope_is_what_was_folded():
    """A model whose features another takes: folded alone it is refused, and together with the other it is not."""
    inner = vit(models.UN)
    together = Outer(copy.deepcopy(inner)).eval()
    before = together(X)
    fuse_norms(together, example=X, strict=True)
    torch.testing.assert_close(together(X), before)
    with pytest.raises(RuntimeError, match=REFUSED.format('forward_features')):
        together.inner.forward_features(X)
    fuse_norms(inner, strict=True)
    with pytest.raises(RuntimeError, match='^Outer.forward runs a part'):
        Outer(inner)(X)


def test_a_forward_pass_of_another_name_is_no_scope():
    class Renamed(Outer):

        def run(self, x):
            return self.head(self.inner.forward_features(x)[:, 0])

        forward = run

    model = Renamed(vit(models.UN)).eval()
    fuse_norms(model, example=X, strict=True)
    model(X)


def test_parts_of_other_packages():
    model = models.randomize(models.vit_classifier(models.LN), gamma='none')
    images = torch.randn(1, 3, 32, 32)
    fuse_norms(model)
    model(images, mode='tensor')
    model.predict(images)
    model.loss(images, [DataSample().set_gt_label(0)])
    for part, name in ((model.extract_feat, 'ImageClassifier.extract_feat'),
                       (model.backbone, 'VisionTransformer.forward')):
        with pytest.raises(RuntimeError, match=f'^{name} runs a part of a folded model'):
            part(images)
    detector = models.randomize(models.detector(models.LN), gamma='none')
    fuse_norms(detector)
    detector.extract_feat(images)


def test_blocks_that_are_computed_again():
    model = vit(models.UN)
    fuse_norms(model, rotate='hadamard')
    model.set_grad_checkpointing()
    model.train()(X).sum().backward()
    block = model.blocks[0]
    with pytest.raises(RuntimeError, match='^Block.forward runs a part'):
        checkpoint(block, torch.randn(1, 5, 16), use_reentrant=False)


@pytest.mark.parametrize('rotate', [None, 'hadamard'])
def test_parts_may_be_allowed_and_their_tokens_restored(rotate):
    model = vit()
    folded = copy.deepcopy(model)
    fuse_norms(folded, rotate=rotate)
    allow_partial_calls(folded)
    stream, = streams_of(folded)
    tokens, expected = (net.forward_intermediates(X, norm=False, intermediates_only=True, output_fmt='NLC')
                        for net in (folded, model))
    for one, other in zip(tokens, expected, strict=True):
        torch.testing.assert_close(stream.restore(one), other - other.mean(-1, keepdim=True), rtol=1e-4, atol=1e-4)


def test_files_of_older_versions_load_with_a_warning(in_a_folder):
    model = vit()
    fuse_norms(model)
    save_folded(model, 'folded.pth')
    checkpoint = torch.load('folded.pth', weights_only=True)
    note = checkpoint['meta']['mmunorm']
    del note['scopes'], note['streams']
    note['changed_streams'] = True
    torch.save(checkpoint, 'older.pth')
    with pytest.warns(UserWarning, match='of an older mmunorm: its parts, if they are called alone'):
        old = load_folded('older.pth', vit())
    assert torch.equal(old(X), model(X)) and not streams_of(old)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        load_folded('folded.pth', vit())


class PreTrainedModel(nn.Module):
    """A model as transformers has them."""

    def __init__(self):
        super().__init__()
        self.vit, self.config = vit(), SimpleNamespace(output_hidden_states=False)

    def forward(self, x, output_hidden_states=None):
        wanted = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        hidden_states = self.vit.forward_intermediates(x, intermediates_only=True, norm=False) if wanted else None
        return SimpleNamespace(logits=self.vit(x), hidden_states=hidden_states)

    def save_pretrained(self, folder):
        torch.save(self.state_dict(), folder)


class Normalized(PreTrainedModel):
    """Its last hidden state is normalized."""

    def forward(self, x, output_hidden_states=None):
        tokens = self.vit.forward_features(x)
        hidden_states = tokens if output_hidden_states or self.config.output_hidden_states else None
        return SimpleNamespace(logits=self.vit.forward_head(tokens), hidden_states=hidden_states)


class Asking(PreTrainedModel):
    """Asks a part for hidden states."""

    def __init__(self, part):
        super().__init__()
        self.vit, self.head = part, nn.Linear(16, 2)

    def forward(self, x):
        return self.head(self.vit(x, output_hidden_states=True).hidden_states[-1].mean((2, 3)))


@pytest.mark.parametrize('cls, layer_norms', [(PreTrainedModel, 'exact'), (Normalized, 'affine')])
def test_hidden_states_of_transformers_are_refused_if_they_change(cls, layer_norms, in_a_folder):
    model = cls().eval()
    before = copy.deepcopy(model)
    fuse_norms(model, example=X, layer_norms=layer_norms)
    save_folded(model, 'folded.pth')
    loaded = load_folded('folded.pth', cls())
    for one in (model, loaded):
        torch.testing.assert_close(one(X).logits, before(X).logits, rtol=1e-4, atol=1e-4)
        for call in (lambda one=one: one(X, output_hidden_states=True), lambda one=one: one(X)):
            with pytest.raises(RuntimeError, match='^output_hidden_states returns tokens'):
                call()
            one.config.output_hidden_states = True
        allow_partial_calls(one)
        one(X)


def test_hidden_states_of_transformers_that_stay_are_not_refused():
    for example, layer_norms in ((X, 'affine'), (dict(x=X, output_hidden_states=True), 'exact')):
        model = PreTrainedModel().eval()
        before = model(X, output_hidden_states=True).hidden_states
        report = fuse_norms(model, example=example, layer_norms=layer_norms)
        assert report.reduced
        torch.testing.assert_close(model(X, output_hidden_states=True).hidden_states, before)


def test_a_model_may_ask_its_parts_for_hidden_states():
    model = Asking(PreTrainedModel()).eval()
    before = model(X)
    assert fuse_norms(model, example=X, rotate='hadamard').streams
    torch.testing.assert_close(model(X), before, rtol=1e-4, atol=1e-4)
    with pytest.raises(RuntimeError, match='^output_hidden_states returns tokens'):
        model.vit(X, output_hidden_states=True)


class Passing(Asking):
    """Returns the hidden states of a part if the config of the part asks for them."""

    def forward(self, x):
        return self.vit(x)


def test_hidden_states_that_the_config_of_a_part_asks_for_are_refused():
    model = Passing(PreTrainedModel()).eval()
    assert fuse_norms(model, example=X).streams
    model(X)
    model.vit.config.output_hidden_states = True
    with pytest.raises(RuntimeError, match='^output_hidden_states returns tokens'):
        model(X)


def test_save_pretrained_is_refused():
    """Because `from_pretrained` builds a model with norms, and only warns that the file has none."""
    model = PreTrainedModel().eval()
    fuse_norms(model, example=X, layer_norms='keep')
    assert 'save_pretrained' not in vars(model)
    fuse_norms(model, example=X)
    for one in (model, pickled(model)):
        with pytest.raises(RuntimeError, match='^save_pretrained: the model is folded.*save_folded'):
            one.save_pretrained('folder')


class Pooled(nn.Module):
    """Returns its normalized tokens, and a layer of one of them, as transformers' models with a pooler do."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.pooler = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x):
        tokens = self.norm(self.embed(x))
        return tokens, self.pooler(tokens[:, 0])


class UsesOne(nn.Module):

    def __init__(self):
        super().__init__()
        self.pooled = Pooled()

    def forward(self, x):
        return self.pooled(x)[1].relu()


def test_outputs_that_the_model_does_not_use_are_refused():
    model, x = models.randomize(UsesOne().eval()), torch.randn(2, 3, 8)
    before = model(x)
    assert fuse_norms(model, example=x).reduced[0].where == 'pooled.pooler'
    torch.testing.assert_close(model(x), before)
    with pytest.raises(RuntimeError, match='^Pooled.forward runs a part of a folded model'):
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
def test_methods_that_examples_call(runs_forward, in_a_folder):
    model, x = models.randomize(WithFeatures().eval()), torch.randn(2, 3, 8)
    before = copy.deepcopy(model)
    fuse_norms(model, example=[x] * runs_forward + [lambda model: model.features(x)])
    save_folded(model, 'folded.pth')
    for one in (model, load_folded('folded.pth', WithFeatures())):
        torch.testing.assert_close(one.features(x), before.features(x))
        with pytest.raises(RuntimeError, match='^Sequential.forward runs a part of a folded model'):
            one.part(x)
        if runs_forward:
            torch.testing.assert_close(one(x), before(x))
        else:
            with pytest.raises(RuntimeError, match='^WithFeatures.forward runs a part of a folded model'):
                one(x)


def test_the_error_names_the_method_not_what_wraps_it():
    def wrapped(method):
        @functools.wraps(method)
        def wrapper(self, *args, **kwargs):
            return method(self, *args, **kwargs)

        return wrapper

    class Wrapped(Pooled):
        forward = wrapped(Pooled.forward)

    model = UsesOne()
    model.pooled = Wrapped()
    fuse_norms(models.randomize(model.eval()), example=torch.randn(2, 3, 8))
    with pytest.raises(RuntimeError, match='^Wrapped.forward runs a part'):
        model.pooled(torch.randn(2, 3, 8))
