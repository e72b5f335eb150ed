"""A converted model learns its teacher's outputs from images alone."""
import copy

import pytest
import torch

from mmunorm import adapt, convert_norms
from mmunorm.conversion import ConversionError, agreement, blockwise
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


def pair(make=vit):
    """A converted model and its teacher, with random weights."""
    torch.manual_seed(0)
    teacher = make().eval()
    for weight in teacher.parameters():
        weight.data += 0.1 * torch.randn_like(weight)
    model = copy.deepcopy(teacher)
    convert_norms(model, images(16).split(8))
    return model, teacher


FAST = dict(batch_size=8, lr=1e-3, block_lr=1e-3, tokens=16)


@pytest.mark.parametrize('make', [vit, swin])
def test_each_phase_comes_nearer_to_the_teacher(make):
    model, teacher = pair(make)
    model.train()
    before = copy.deepcopy(teacher.state_dict())
    report = adapt(model, teacher, images(), 30, block_steps=30, **FAST)
    converted, blocks, whole = report.agreements.values()
    assert converted.tokens < min(blocks.tokens, whole.tokens)
    assert converted.pooled < blocks.pooled < whole.pooled
    for phase in ('block by block', 'end to end'):
        losses = [check['loss'] for check in report.history if check['phase'] == phase]
        assert losses[-1] < losses[0]
    assert all(new < old for old, new in report.norms.values()) and len(report.norms) == len(layer_norms(teacher))
    assert ('windows' in ''.join(report.notes)) == (make is swin)
    assert model.training and not teacher.training
    torch.testing.assert_close(teacher.state_dict(), before, rtol=0, atol=0)
    held_out = images()[-3:]
    assert agreement(model.eval(), teacher, held_out).tokens == pytest.approx(whole.tokens, abs=1e-4)


def test_parts_are_blocks_merging_and_the_norms_outside_of_them():
    model = swin()
    norms = set(layer_norms(model).values())
    assert list(blockwise._parts(model, norms)) == ['patch_embed', 'layers.0.blocks.0', 'layers.1.downsample',
                                                    'layers.1.blocks.0', 'norm']


def test_a_step_sees_the_class_token_and_some_patch_tokens():
    model, teacher = pair()
    seen = set()
    model.blocks[0].register_forward_hook(lambda module, args, output: seen.add((module.training, args[0].shape[1])))
    adapt(model, teacher, images(), 2, block_steps=0, **FAST)
    assert {tokens for _, tokens in seen} == {17, 65}  # of steps, and of what is measured


def test_one_image():
    model, teacher = pair()
    report = adapt(model, teacher, images(1), 6, **FAST)
    assert report.agreements['converted'].pooled is None and 'one image' in report.notes[0]
    assert str(report)


def test_steps_that_are_not_finite_are_skipped_and_a_rising_loss_goes_back(monkeypatch):
    model, teacher = pair()
    start = copy.deepcopy(model.state_dict())
    relative_error = blockwise._relative_error

    def broken(x, wanted):
        return relative_error(x, wanted) * (torch.nan if torch.is_grad_enabled() else 1)

    with monkeypatch.context() as patch:
        patch.setattr(blockwise, '_relative_error', broken)
        adapt(model, teacher, images(), 4, **FAST)
    for name, value in model.named_parameters():
        if 'norm' not in name:
            torch.testing.assert_close(value, start[name], rtol=0, atol=0)
    report = adapt(model, teacher, images(), 40, block_steps=0, **dict(FAST, lr=1.))
    assert report.history[-1]['rate'] < 0.5
    assert report.agreements['end to end'].tokens >= report.agreements['converted'].tokens - 0.02
    assert all(weight.isfinite().all() for weight in model.parameters())


def test_a_killed_run_goes_on_and_leaves_the_best_weights(tmp_path):
    whole, teacher = pair()
    adapt(whole, teacher, images(), 20, block_steps=20, **FAST)
    model, _ = pair()
    start = copy.deepcopy(model)
    calls = []

    def killed(batch, generator):
        calls.append(len(batch))
        if len(calls) == 31:
            raise KeyboardInterrupt
        return blockwise.mirrored(batch, generator)

    with pytest.raises(KeyboardInterrupt):
        adapt(model, teacher, images(), 20, block_steps=20, augment=killed, work_dir=tmp_path, **FAST)
    saved = torch.load(tmp_path / 'adapt.pt', weights_only=True)['state_dict']
    torch.testing.assert_close(saved, model.state_dict(), rtol=0, atol=0)
    calls.clear()
    adapt(start, teacher, images(), 20, block_steps=20, augment=killed, work_dir=tmp_path, **FAST)
    assert len(calls) == 10
    assert_same(start, whole)
    with pytest.raises(ConversionError, match='adapt.pt is of another adaptation'):
        adapt(start, teacher, images(), 21, work_dir=tmp_path, **FAST)


@pytest.mark.parametrize('change, message', [
    (lambda a: a.update(steps=0), 'steps=0, block_steps=0: at least one step'),
    (lambda a: a.update(steps=-1), 'at least one step'),
    (lambda a: a.update(batch_size=0), 'batch_size=0'),
    (lambda a: a.update(images=[]), 'images: there is none'),
    (lambda a: a.update(images=['cat.jpg']), r"\[0\]: str; must be a tensor"),
    (lambda a: a.update(images=torch.zeros(4, 32, 32)), r'must be'),
    (lambda a: a.update(images=images().byte()), 'torch.uint8; must be floating'),
    (lambda a: a.update(images=torch.zeros(4, 3, 30, 32)), 'does not take'),
    (lambda a: a.update(images=[torch.zeros(3, 32, 32), torch.zeros(3, 32, 16)] * 8), 'one size'),
    (lambda a: a.update(images=images() * torch.nan), 'not finite'),
    (lambda a: a.update(teacher=swin()), 'of another architecture'),
    (lambda a: a.update(teacher=a['model']), 'has no LayerNorm'),
    (lambda a: a.update(model=copy.deepcopy(a['teacher'])), 'no norms to adapt; call convert_norms'),
    (lambda a: a['model'].half(), 'train it in float32'),
    (lambda a: a['model'].requires_grad_(False), 'none of its weights'),
])
def test_bad_input_is_one_line_and_changes_nothing(change, message):
    model, teacher = pair()
    arguments = dict(model=model, teacher=teacher, images=images(), steps=3, **FAST)
    change(arguments)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ConversionError, match=message) as error:
        adapt(**arguments)
    assert '\n' not in str(error.value)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
