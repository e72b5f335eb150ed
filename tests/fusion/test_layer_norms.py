"""Of a LayerNorm, all that is linear folds exactly; a scale of each token is left."""
import copy

import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from mmunorm import fuse_norms, load_folded, replace_norms, save_folded
from mmunorm.fusion import NotFoldedError, TokenScale, streams_of
from mmunorm.fusion.basis import mean_basis, rotation

from ..versions import needs_rms_norm
from . import models

IMAGES = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
SCALE = 'a scale of each token'


class Attention(nn.Module):

    def __init__(self, width, heads=2):
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(((q @ k.mT) * 0.3).softmax(-1).matmul(v).transpose(1, 2).flatten(2))


class Block(nn.Module):

    def __init__(self, width, eps=1e-5, scale=False, norm=nn.LayerNorm):
        super().__init__()
        self.norm1, self.norm2 = norm(width, eps=eps), norm(width, eps=eps)
        self.attn, self.fc1, self.fc2 = Attention(width), nn.Linear(width, 7), nn.Linear(7, width)
        self.gamma = nn.Parameter(torch.ones(width)) if scale else None

    def forward(self, x):
        y = self.attn(self.norm1(x))
        x = x + (y if self.gamma is None else self.gamma * y)
        return x + self.fc2(self.fc1(self.norm2(x)).relu())


class ViT(nn.Module):
    """A pre-norm Transformer of images `(N, 3, 16, 16)`; `read` is how its head reads the tokens."""

    def __init__(self, width=8, depth=2, read='class', **kwargs):
        super().__init__()
        self.embed = nn.Conv2d(3, width, 4, 4)
        self.token, self.position = nn.Parameter(torch.zeros(1, 1, width)), nn.Parameter(torch.zeros(1, 17, width))
        self.blocks = nn.Sequential(*(Block(width, **kwargs) for _ in range(depth)))
        self.norm, self.head = kwargs.get('norm', nn.LayerNorm)(width), nn.Linear(width, 5)
        self.second, self.read = nn.Linear(width, 3), read
        self.wide = nn.Linear(2 * width, 5)

    def forward(self, x):
        x = self.embed(x).flatten(2).mT
        x = torch.cat((self.token.expand(len(x), -1, -1), x), 1) + self.position
        x = self.blocks(x)
        if self.read == 'stream':
            return x
        if self.read == 'raw layer':
            return self.head(self.norm(x)), self.second(x)
        if self.read == 'raw activation':
            return self.head(self.norm(x)), self.second(x.relu())
        if self.read == 'pooled':
            return self.head(self.norm(x.mean(1)))
        if self.read == 'class and mean':
            x = self.norm(x)
            return self.wide(torch.cat((x[:, 0], x[:, 1:].mean(1)), 1))
        if self.read == 'two heads':
            x = self.norm(x)
            return self.head(x[:, 0]), self.second(x[:, 1])
        return self.norm(x) if self.read == 'features' else self.head(self.norm(x)[:, 0])


def randomized(model, seed=0, gamma='none'):
    models.randomize(model, seed, gamma)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.rpartition('.')[2] in ('gamma', 'token', 'position', 'cls_token', 'pos_embed', 'reg_token'):
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def lefts(report):
    return {fold.norm: fold.left for fold in report.reduced}


def check_exact(model, x, **kwargs):
    """Folds a copy and compares it in float64; returns the copy and the report."""
    folded = copy.deepcopy(model)
    report = fuse_norms(folded, example=kwargs.pop('example', x), **kwargs)
    with torch.no_grad():
        before, after = copy.deepcopy(model)(x), folded(x)
        for one, other in zip(*((y if isinstance(y, tuple) else (y, )) for y in (before, after)), strict=True):
            assert (one - other).abs().max() < 1e-4 * one.abs().max()
    assert report.difference < 1e-10
    return folded, report


@settings(deadline=None, max_examples=12)
@given(width=st.sampled_from((2, 6, 8, 12)), depth=st.integers(0, 2), scale=st.booleans(),
       eps=st.sampled_from((1e-6, 0.3)), gamma=st.sampled_from(('none', 'some', 'all')),
       read=st.sampled_from(('class', 'pooled', 'two heads', 'class and mean')),
       rotate=st.sampled_from((None, 'hadamard', 'random')), seed=st.integers(0, 99))
def test_a_pre_norm_transformer(width, depth, scale, eps, gamma, read, rotate, seed):
    model = randomized(ViT(width, depth, read, scale=scale, eps=eps), seed, gamma)
    folded, report = check_exact(model, IMAGES, rotate=rotate)
    assert set(lefts(report).values()) == {SCALE} and len(report.reduced) == 2 * depth + 1 and not report.kept
    assert not any(isinstance(module, nn.LayerNorm) for module in folded.modules())


@pytest.mark.parametrize('read, last, others', [
    # The stream is read as it is: gamma and beta fold, and no token changes.
    ('stream', None, f'its mean and {SCALE}'),
    ('raw activation', f'its mean and {SCALE}', f'its mean and {SCALE}'),
    # A linear layer reads it: the mean becomes a channel.
    ('raw layer', SCALE, SCALE),
    # The features of the last norm are the output: gamma and beta stay.
    ('features', f'{SCALE}, gamma and beta', SCALE)])
def test_who_reads_the_stream(read, last, others):
    _, report = check_exact(randomized(ViT(read=read, scale=True)), IMAGES)
    assert lefts(report).get('norm') == last and lefts(report)['blocks.0.norm1'] == others
    if 'its mean' in others:
        assert not report.streams and all(fold.why_left for fold in report.reduced)


def test_a_rotated_stream_whose_last_norm_is_an_output_gets_a_linear_layer():
    folded, report = check_exact(randomized(ViT(read='features')), IMAGES, rotate='random')
    assert lefts(report)['norm'] == f'{SCALE} and a linear layer' and folded.norm.linear is not None


def test_a_stream_that_cannot_be_rotated_is_centered():
    _, report = check_exact(randomized(ViT(depth=0, read='features')), IMAGES, rotate='random')
    fold, = report.reduced
    assert fold.left == f'{SCALE}, gamma and beta' and fold.why_left.startswith('not rotated: norm would need a linear')


@needs_rms_norm
def test_rms_norms_lose_their_gamma():
    model = randomized(ViT(norm=nn.RMSNorm))
    for rotate in (None, 'hadamard'):
        _, report = check_exact(model, IMAGES, rotate=rotate)
        assert set(lefts(report).values()) == {SCALE} and bool(report.streams) == bool(rotate)


@pytest.mark.parametrize('rotate, gamma', [(None, 'none'), ('hadamard', 'some'), ('random', 'none')])
def test_swin_with_padded_windows_and_patch_merging(rotate, gamma):
    """timm's parts of a merged token are side by side; images of 28 and 36 pixels pad windows."""
    swin = timm.create_model('swin_tiny_patch4_window7_224', img_size=56, embed_dim=8, depths=(2, 2, 1),
                             num_heads=(1, 2, 4), window_size=5, num_classes=5)
    x = torch.randn(1, 3, 56, 56)
    folded, report = check_exact(randomized(swin, gamma=gamma), x, rotate=rotate)
    assert lefts(report)['patch_embed.norm'] == f'{SCALE} and a linear layer'
    assert lefts(report)['layers.1.downsample.norm'] == lefts(report)['layers.0.blocks.1.norm2'] == SCALE
    assert folded.layers[1].downsample.norm.num_tokens == 4 and len(report.reduced) == 14 and not report.kept


@pytest.mark.parametrize('rotate', [None, 'hadamard'])
def test_merged_tokens_whose_channels_alternate(rotate):
    model = randomized(models.swin_classifier(norm_cfg=models.LN), gamma='none')
    x = torch.randn(1, 3, 36, 28)
    before = model(x)
    report = fuse_norms(model, rotate=rotate)
    assert len(report.reduced) == 11 and report.difference < 1e-10
    assert lefts(report)['backbone.stages.0.downsample.norm'] == SCALE
    assert model.backbone.stages[0].downsample.norm.arguments['mean_channels'] == [0, 1, 2, 3]
    torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-4)


def test_streams_of_offline_norms_are_rotated_on_request():
    model = randomized(replace_norms(ViT(), dict(type='UN')))
    _, plain = check_exact(model, IMAGES, strict=True)
    folded, report = check_exact(model, IMAGES, strict=True, rotate='hadamard')
    assert not plain.streams and len(report.streams) == 1 and not report.reduced
    assert not torch.equal(folded.token, model.token)


def test_streams_of_offline_norms_with_padded_windows_are_rotated():
    model = randomized(models.swin_classifier(), gamma='none')
    x = torch.randn(1, 3, 36, 28)
    before = model(x)
    report = fuse_norms(model, example=x, rotate='hadamard')
    assert len(report.streams) == 2 and report.difference < 1e-10
    assert any(fold.pads for fold in report.folded)
    torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-4)


def test_two_streams_that_meet():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 8)
            self.norm_a, self.norm_b, self.norm = nn.LayerNorm(8), nn.LayerNorm(8), nn.LayerNorm(8)
            self.read_a, self.read_b, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2)

        def forward(self, x):
            a, b = self.a(x), self.b(x)
            a, b = a + self.read_a(self.norm_a(a)), b + self.read_b(self.norm_b(b))
            return self.head(self.norm(a + b)), self.c(self.norm_a(a))

    _, report = check_exact(randomized(Two()), torch.randn(3, 4, 6))
    assert len(report.streams) == 1 and set(report.streams[0].norms) == {'norm_a', 'norm_b', 'norm'}


def test_shared_writers_stay():
    model = randomized(ViT())
    model.blocks[1].fc2.weight = model.blocks[0].fc2.weight
    _, report = check_exact(model, IMAGES)
    assert not report.streams and 'is shared with' in report.reduced[0].why_left


def test_post_norm_stays():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0)
    report = fuse_norms(randomized(layer), example=torch.randn(2, 5, 8))
    assert not report.streams and not any(fold.left == SCALE for fold in report.reduced)


def test_torchs_pre_norm_encoder_runs_its_folded_norms():
    """torch's fast path would read the weights of the norms."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True, dropout=0)
    encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(8), enable_nested_tensor=False)
    model = randomized(nn.Sequential(nn.Linear(6, 8), encoder, nn.Linear(8, 3)))
    _, report = check_exact(model, torch.randn(2, 5, 6))
    assert set(lefts(report).values()) == {SCALE} and len(report.reduced) == 5


def test_how_far_layer_norms_go():
    model = randomized(ViT())
    folded, report = check_exact(model, IMAGES, layer_norms='affine')
    assert set(lefts(report).values()) == {f'its mean and {SCALE}'} and not report.streams
    assert torch.equal(folded.token, model.token)
    report = fuse_norms(model, example=IMAGES, layer_norms='keep')
    assert len(report.kept) == 5 and not report.reduced and isinstance(model.norm, nn.LayerNorm)
    with pytest.raises(NotFoldedError, match='computes its statistics at inference'):
        fuse_norms(model, example=IMAGES, strict=True)
    assert isinstance(model.norm, nn.LayerNorm)


@pytest.mark.parametrize('kwargs', [dict(layer_norms='all'), dict(rotate='hadamar'), dict(rotate=True),
                                    dict(rotate='random', layer_norms='affine')])
def test_wrong_choices(kwargs):
    with pytest.raises(ValueError, match=next(iter(kwargs))):
        fuse_norms(ViT().eval(), example=IMAGES, **kwargs)


@pytest.mark.parametrize('mode', [torch.no_grad, torch.inference_mode])
def test_without_gradients_as_much_is_folded(mode):
    model = randomized(ViT())
    with mode():
        report = fuse_norms(model, example=IMAGES)
    assert set(lefts(report).values()) == {SCALE}


def test_folding_twice_changes_nothing():
    model = randomized(ViT())
    fuse_norms(model, example=IMAGES)
    state = copy.deepcopy(model.state_dict())
    report = fuse_norms(model, example=IMAGES)
    assert not (report.reduced or report.folded or report.kept or report.streams)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_a_folded_model_trains():
    model = randomized(ViT(scale=True))
    fuse_norms(model, example=IMAGES)
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    losses = []
    for _ in range(5):
        loss = model(IMAGES).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)


def test_gradients_of_the_input_are_those_of_the_model():
    model = randomized(ViT()).double()
    folded = copy.deepcopy(model)
    fuse_norms(folded, example=IMAGES, rotate='random')
    gradients = []
    for one in (model, folded):
        x = IMAGES.double().requires_grad_()
        one(x).square().sum().backward()
        gradients.append(x.grad)
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize('rotate', [None, 'hadamard'])
def test_saved_and_loaded(rotate, tmp_path):
    swin = timm.create_model('swin_tiny_patch4_window7_224', img_size=32, embed_dim=8, depths=(1, 1),
                             num_heads=(1, 2), window_size=4, num_classes=5)
    fresh, x = copy.deepcopy(swin), torch.randn(1, 3, 32, 32)
    report = fuse_norms(randomized(swin), rotate=rotate)
    save_folded(swin, tmp_path / 'folded.pth', report=report)
    loaded = load_folded(tmp_path / 'folded.pth', fresh)
    assert torch.equal(loaded(x), swin(x)) and sum(isinstance(m, TokenScale) for m in loaded.modules()) == 7
    with pytest.raises(RuntimeError, match='^SwinTransformer.forward_intermediates runs a part of a folded model'):
        loaded.forward_intermediates(x)
    for stream, expected in zip(streams_of(loaded), report.streams, strict=True):
        assert (stream.norms, stream.is_centered, stream.has_mean_channel) == (
            expected.norms, expected.is_centered, expected.has_mean_channel)
        assert stream.basis is expected.basis or torch.equal(stream.basis, expected.basis)


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_half_precision_does_not_overflow(dtype):
    scale = TokenScale(8, 1e-5, 'mean_square', mean_channels=[0]).to(dtype)
    x = 300 * torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
    expected = x / (x[..., 1:].square().sum(-1, keepdim=True) / 8 + 1e-5).sqrt()
    torch.testing.assert_close(scale(x.to(dtype)).float(), expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize('width', [1, 2, 8, 12, 96, 45])
def test_bases_are_orthogonal(width):
    for kind in (None, 'hadamard', 'random'):
        bases = [mean_basis(width, kind, 3)] + ([rotation(width, kind, 3)] if kind else [])
        for basis in bases:
            torch.testing.assert_close(basis @ basis.mT, torch.eye(width).double(), rtol=0, atol=1e-12)
        mean = torch.full((width, ), width**-0.5, dtype=torch.float64)
        torch.testing.assert_close(bases[0][0], mean, rtol=0, atol=1e-12)
