"""A converted model learns its teacher's outputs from images alone."""
import copy
from functools import cache

import pytest
import torch

from mmunorm import adapt, convert_norms
from mmunorm.conversion import ConversionError, adaptation, agreement
from mmunorm.norms.replace import layer_norms

from .models import assert_same

timm = pytest.importorskip('timm')


def vit():
    return timm.models.VisionTransformer(img_size=32, patch_size=4, embed_dim=32, depth=2, num_heads=2, num_classes=0)


def swin():
    return timm.models.SwinTransformer(img_size=32, patch_size=2, embed_dim=16, depths=(1, 1), num_heads=(2, 2),
                                       window_size=4, num_classes=5)


def images(number=24):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(number, 3, 32, 32, generator=generator) * (
        0.3 + 3 * torch.rand(number, 1, 1, 1, generator=generator))


@cache
def _pair(make):
    torch.manual_seed(0)
    teacher = make().eval()
    for weight in teacher.parameters():
        weight.data += 0.1 * torch.randn_like(weight)
    model = copy.deepcopy(teacher)
    convert_norms(model, images(16).split(8))
    return model, teacher


def pair(make=vit):
    """A converted model and its teacher, with random weights."""
    return copy.deepcopy(_pair(make))


FAST = dict(batch_size=8, lr=1e-3, block_lr=1e-3, tokens=16)


@pytest.mark.parametrize('make', [vit, swin])
def test_each_phase_comes_nearer_to_the_teacher(make, capsys):
    model, teacher = pair(make)
    model.train()
    model.norm.eval()
    before = copy.deepcopy(teacher.state_dict())
    report = adapt(model, teacher, images(), 30, block_steps=30, progress=True, **FAST)
    assert 'end to end, step 20 of 30: loss 0.' in capsys.readouterr().out
    converted, blocks, whole = report.agreements.values()
    assert converted.tokens < min(blocks.tokens, whole.tokens)
    assert converted.pooled < blocks.pooled < whole.pooled
    for phase in ('block by block', 'end to end'):
        losses = [check['loss'] for check in report.history if check['phase'] == phase]
        assert losses[-1] < losses[0]
    assert all(new < old for old, new in report.norms.values()) and len(report.norms) == len(layer_norms(teacher))
    torch.testing.assert_close(teacher.state_dict(), before, rtol=0, atol=0)
    assert model.training and not model.norm.training and not teacher.training
    assert all(weight.grad is None for weight in model.parameters())
    held_out = images()[-3:]
    assert agreement(model.eval(), teacher, held_out).tokens == pytest.approx(whole.tokens, abs=1e-4)
    read = []
    model.norm.register_forward_hook(lambda module, args, output: read.append(args[0].flatten(0, -2)))
    model(held_out)
    torch.testing.assert_close(model.norm.running_var, read[0].square().mean(0), rtol=1e-4, atol=1e-5)


def test_images_may_become_floating_point_in_augment():
    model, teacher = pair()
    pixels = (images() * 40 + 128).clamp(0, 255).byte()
    adapt(model, teacher, pixels, 1, block_steps=0, held_out=images(8), augment=lambda x, _: x.float() / 255, **FAST)


def test_parts_are_blocks_merging_and_the_norms_outside_of_them():
    model = swin()
    norms = set(layer_norms(model).values())
    assert list(adaptation._parts(model, norms)) == ['patch_embed', 'layers.0.blocks.0', 'layers.1.downsample',
                                              'layers.1.blocks.0', 'norm']


def test_a_step_sees_the_class_token_and_some_patch_tokens():
    model, teacher = pair()
    sizes = set()
    model.blocks[0].register_forward_hook(lambda module, args, output: sizes.add(args[0].shape[1]))
    adapt(model, teacher, images(), 2, block_steps=0, **FAST)
    assert sizes == {17, 65}  # of steps, and of what is measured


def test_one_image():
    report = adapt(*pair(), images(1), 6, **FAST)
    assert report.agreements['converted'].pooled is None and str(report)


class Stream(torch.utils.data.IterableDataset):

    def __iter__(self):
        return iter(images())


def kinds_of_images():
    """The same images in every form that is taken."""
    data = torch.utils.data.TensorDataset(images(), torch.zeros(24))
    return dict(tensor=images(), batches=images().split(10), pairs=[(images()[:9], 0), (images()[9:], 0)],
                dicts=[dict(labels=torch.zeros(4), pixel_values=batch) for batch in images().split(4)],
                generator=iter(images().split(7)), loader=torch.utils.data.DataLoader(data, 5, shuffle=True),
                stream=torch.utils.data.DataLoader(Stream(), 5))


@pytest.mark.parametrize('kind', kinds_of_images())
def test_all_kinds_of_images(kind):
    model, teacher = pair(Pooled)
    expected = copy.deepcopy(model)
    first = adapt(expected, teacher, images(), 3, block_steps=0, **FAST)
    assert adapt(model, teacher, kinds_of_images()[kind], 3, block_steps=0, **FAST) == first
    assert_same(model, expected)
    assert agreement(model, teacher, kinds_of_images()[kind]) == agreement(model, teacher, images())


class Pooled(torch.nn.Module):
    """Takes images of any size."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.last = torch.nn.Conv2d(3, 8, 4, 4), torch.nn.LayerNorm(8), torch.nn.Linear(8, 8)

    def forward(self, x):
        return self.last(self.norm(self.conv(x).flatten(2).transpose(1, 2)))


@torch.no_grad()
def test_agreement_is_that_of_an_output_that_has_tokens():
    teacher = Pooled()
    model, given = copy.deepcopy(teacher), images()
    convert_norms(model, given)
    both = torch.stack([net.eval()(given).flatten() for net in (model, teacher)])
    assert agreement(model, teacher, given).tokens == pytest.approx(both.corrcoef()[0, 1].item(), abs=1e-6)


def test_agreement_keeps_the_mode_of_models():
    model, teacher = pair()
    expected, before = agreement(model.eval(), teacher, images()), copy.deepcopy(model)
    assert agreement(model.train(), teacher.train(), images()) == expected
    assert model.training and teacher.training
    assert_same(model, before)


@pytest.mark.parametrize('mode', [torch.no_grad, torch.inference_mode])
def test_it_converts_and_trains_where_gradients_are_off(mode):
    with mode():
        given = images()
    teacher = pair()[1]
    model = copy.deepcopy(teacher)
    with mode():
        convert_norms(model, given)
        report = adapt(model, teacher, given, 20, block_steps=0, **FAST)
    assert report.history[-1]['loss'] < report.history[0]['loss']
    assert not any(value.is_inference() for value in model.state_dict().values())


class WithLoss(Pooled):
    """Returns a number, too, as mixtures of experts do, which is not compared."""

    def forward(self, x):
        tokens = super().forward(x)
        return tokens, tokens.mean()


class PooledFirst(Pooled):
    """Its last norm has one token of each image, and it returns a dict, as transformers' models do."""

    def forward(self, x):
        return dict(logits=self.last(self.norm(self.conv(x).mean((2, 3)))))


@pytest.mark.parametrize('make, given', [
    (PooledFirst, images()), (Pooled, [images(8)[:, :, :height] for height in (16, 32, 24)]),
    (WithLoss, images())], ids=['pooled_first', 'images_of_several_sizes', 'output_without_dimensions'])
def test_other_images_and_outputs(make, given):
    report = adapt(*pair(make), given, 20, block_steps=0, **FAST)
    assert report.history[-1]['loss'] < report.history[0]['loss']


class ConstantOutput(Pooled):
    """Returns a constant, as an enhancer does where it clips."""

    def forward(self, x):
        return super().forward(x) * 0 + 0.9


def test_the_correlation_with_a_constant_is_0():
    torch.manual_seed(0)
    teacher, model, given = ConstantOutput(), Pooled(), torch.randn(2, 3, 200, 200)
    convert_norms(model, given)
    assert agreement(model, teacher, given).tokens == agreement(teacher, teacher, given).tokens == 0


def test_steps_that_are_not_finite_are_skipped_and_the_best_weights_kept(monkeypatch):
    model, teacher = pair()
    start, relative_error, calls = copy.deepcopy(model.state_dict()), adaptation._relative_error, []

    def broken(x, wanted):
        calls.append(x)
        return relative_error(x, wanted) * (torch.nan if torch.is_grad_enabled() else 1)

    with monkeypatch.context() as patch:
        patch.setattr(adaptation, '_relative_error', broken)
        report = adapt(model, teacher, images(), 4, **FAST)
    assert report.notes == ('block by block: 1 of 1 step skipped, loss or gradient not finite',
                            'end to end: 4 of 4 steps skipped, loss or gradient not finite')
    assert calls and all(check['loss'] < 10 for check in report.history)  # no weight was NaN before
    for name, value in model.named_parameters():
        if 'norm' not in name:
            torch.testing.assert_close(value, start[name], rtol=0, atol=0)
    report = adapt(model, teacher, images(), 40, block_steps=0, **dict(FAST, lr=1.))
    assert report.history[-1]['loss'] > report.history[0]['loss'] / 2
    assert report.agreements['end to end'].score >= report.agreements['converted'].score
    assert all(weight.isfinite().all() for weight in model.parameters())


def test_a_phase_that_lowers_the_score_is_undone(monkeypatch):
    model, teacher = pair()
    expected, relative_error = model.eval()(images()), adaptation._relative_error
    monkeypatch.setattr(adaptation, '_relative_error', lambda x, wanted: relative_error(x, -wanted))
    report = adapt(model, teacher, images(), 0, block_steps=20, **FAST)
    assert 'block by block made the whole model worse, so its weights are those before: all tok' in report.notes[0]
    assert len(set(map(str, report.agreements.values()))) == 1
    torch.testing.assert_close(model(images()), expected, rtol=1e-4, atol=1e-4)


def test_an_interrupted_run_leaves_the_model_as_it_was():
    model, teacher = pair()
    model.train()
    before, calls = copy.deepcopy(model), []

    def killed(batch, generator):
        calls.append(len(batch))
        if len(calls) == 35:  # in the second phase
            raise KeyboardInterrupt
        return adaptation.mirrored(batch, generator)

    with pytest.raises(KeyboardInterrupt):
        adapt(model, teacher, images(), 20, block_steps=20, augment=killed, **FAST)
    assert_same(model, before)
    assert model.training


def broken(batch, index):
    batch[index, 0, 0, 0] = torch.nan
    return batch


@pytest.mark.parametrize('change, message', [
    (lambda a: a.update(steps=2.5), 'steps must be an int of at least 0, got 2.5'),
    (lambda a: a.update(block_steps=-1), 'block_steps must be an int of at least 0, got -1'),
    (lambda a: a.update(batch_size=0), 'batch_size must be an int of at least 1, got 0'),
    (lambda a: a.update(augment=lambda x, _: None), 'images after augment: NoneType; must be floating-point'),
    (lambda a: a.update(held_out=broken(images(8), 5)), 'held_out: the outputs of the models are not finite'),
    (lambda a: a['teacher'].load_state_dict(dict(a['teacher'].state_dict(), **{'pos_embed': a['model'].pos_embed}),
                                            assign=True), 'teacher: shares pos_embed with the model'),
    (lambda a: a.update(images=5), 'images: int; must be a tensor'),
    (lambda a: a.update(images=torch.zeros(4, 32, 32)), r'held_out\[0\]: \(32, 32\); must be a tensor \(C, H, W\)'),
    (lambda a: a.update(images=images().byte()), 'torch.uint8; must be floating'),
    (lambda a: a.update(images=list(images())), 'images: list; must be .* with at least one image'),
    (lambda a: a.update(images=images() * torch.nan), 'not finite'),
    (lambda a: a.update(teacher=swin()), 'has another architecture'),
    (lambda a: a.update(teacher=a['model']), 'has no LayerNorm'),
    (lambda a: a.update(model=copy.deepcopy(a['teacher'])), 'no norms to adapt; call convert_norms'),
    (lambda a: a['model'].half(), 'model: cls_token is torch.float16; train in float32'),
])
def test_bad_input_is_one_line_and_changes_nothing(change, message):
    model, teacher = pair()
    arguments = dict(model=model, teacher=teacher, images=images(), steps=3, **FAST)
    change(arguments)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=message) as error:
        adapt(**arguments)
    assert isinstance(error.value, ConversionError) or 'must be an int' in message
    assert '\n' not in str(error.value)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    with pytest.raises(TypeError, match='^teacher: must be an nn.Module, got Tensor'):
        adapt(model, images(), teacher)
