"""Of a LayerNorm, gamma and beta fold exactly; streams and heads rotate, and keys and values lose a constant."""
import copy

import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from mmunorm import fuse_norms, load_folded, replace_norms, save_folded
from mmunorm.fusion import FoldedLayerNorm, NotFoldedError, allow_partial_calls, streams_of
from mmunorm.fusion.basis import head_rotation, rotation

from ..versions import needs_grouped_queries, needs_rms_norm
from . import models

IMAGES = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
PLAIN = 'without weights'


class Attention(nn.Module):

    def __init__(self, width, heads=2):
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.read((q @ k.mT) * 0.3, v)

    def read(self, scores, v):
        return self.proj(scores.softmax(-1).matmul(v).transpose(1, 2).flatten(2))


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


ROTATIONS = pytest.mark.parametrize('rotate', [None, 'hadamard'])


@settings(deadline=None, max_examples=16)
@given(width=st.sampled_from((4, 6, 8, 12)), depth=st.integers(0, 2), scale=st.booleans(),
       eps=st.sampled_from((1e-6, 0.3)), gamma=st.sampled_from(('none', 'some', 'all')),
       read=st.sampled_from(('class', 'pooled', 'two heads', 'class and mean')),
       rotate=st.sampled_from((None, 'hadamard')), calibrated=st.booleans(), seed=st.integers(0, 99))
def test_a_pre_norm_transformer(width, depth, scale, eps, gamma, read, rotate, calibrated, seed):
    model = randomized(ViT(width, depth, read, scale=scale, eps=eps), seed, gamma)
    folded, report = check_exact(model, IMAGES, rotate=rotate, calibration=IMAGES if calibrated else None)
    assert set(lefts(report).values()) == {PLAIN} and len(report.reduced) == 2 * depth + 1 and not report.kept
    assert not any(type(module) is nn.LayerNorm for module in folded.modules())
    assert len(report.streams) == (rotate is not None) and report.attentions == (
        2 * depth if rotate or calibrated else 0)


@pytest.mark.parametrize('read, norm, is_rotated', [
    # The stream is read as it is: gamma and beta fold, and no token changes.
    ('stream', None, False), ('raw activation', PLAIN, False),
    ('raw layer', PLAIN, True),
    # The features of the last norm are the output.
    ('features', f'{PLAIN}, and a linear layer', True)])
def test_who_reads_the_stream(read, norm, is_rotated):
    model = randomized(ViT(read=read, scale=True))
    _, report = check_exact(model, IMAGES)
    assert lefts(report).get('norm') == (None if read == 'features' else norm) and not report.streams
    _, report = check_exact(model, IMAGES, rotate='hadamard')
    assert lefts(report).get('norm') == norm and lefts(report)['blocks.0.norm1'] == PLAIN
    assert len(report.streams) == is_rotated
    assert {fold.not_rotated.code for fold in report.reduced if fold.not_rotated} == (set() if is_rotated else {
        'stream used'})


def means(model, x):
    """The mean query, key and value of each attention, over tokens and images."""
    found = []
    hooks = [block.attn.qkv.register_forward_hook(lambda module, args, y: found.append(y.mean((0, 1)).chunk(3)))
             for block in model.blocks]
    model(x)
    for hook in hooks:
        hook.remove()
    return [torch.stack(part) for part in zip(*found, strict=True)]


def test_keys_and_values_lose_their_mean():
    folded, report = check_exact(randomized(ViT()), IMAGES, calibration=[IMAGES[:1], (IMAGES[1:], 'a label')])
    queries, keys, values = means(folded, IMAGES)
    assert report.attentions == 4 and queries.abs().max() > 0.1
    torch.testing.assert_close((keys, values), (torch.zeros_like(keys), torch.zeros_like(values)), rtol=0, atol=1e-5)


class HeadsLast(Attention):
    """As NesT of timm: the layer after it reads the first channel of each head, then the second."""

    def read(self, scores, v):
        return self.proj(scores.softmax(-1).matmul(v).permute(0, 2, 3, 1).flatten(2))


class Grouped(nn.Module):
    """Two groups of two queries, each group with a key and a value."""

    def __init__(self, width):
        super().__init__()
        self.q, self.kv, self.proj = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        q, (k, v) = self.q(x).unflatten(-1, (4, -1)).transpose(1, 2), self.kv(x).unflatten(-1, (2, 2, -1)).permute(
            2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.proj(y.transpose(1, 2).flatten(2))


@needs_grouped_queries
@ROTATIONS
def test_groups_of_queries_share_a_key(rotate):
    folded, report = fold_with(Grouped, rotate=rotate)
    found = []
    for block in folded.blocks:
        block.attn.kv.register_forward_hook(lambda module, args, y: found.append(y.mean((0, 1)).abs().max()))
    folded(IMAGES)
    assert report.attentions == 4 and max(found) < 1e-5


class Compared(Attention):

    def read(self, scores, v):
        y = super().read(scores, v)
        return y if bool((scores < 1e9).all()) else -y


def fold_with(attention, **kwargs):
    model = ViT()
    for block in model.blocks:
        block.attn = attention(8)
    return check_exact(randomized(model), IMAGES, calibration=IMAGES, **kwargs)


def test_heads_that_are_read_in_another_order():
    folded, report = fold_with(HeadsLast)
    assert report.attentions == 4 and means(folded, IMAGES)[2].abs().max() < 1e-5


def test_keys_whose_scores_are_compared_keep_their_mean():
    folded, report = fold_with(Compared)
    keys, values = means(folded, IMAGES)[1:]
    assert report.attentions == 2 and keys.abs().max() > 0.1 and values.abs().max() < 1e-5


def test_a_stream_without_enough_norms_is_not_rotated():
    _, report = check_exact(randomized(ViT(depth=0, read='features')), IMAGES, rotate='hadamard')
    fold, = report.kept
    assert fold.obstacle.code == 'used' and fold.not_rotated.code == 'own layer' and not report.streams


@needs_rms_norm
@ROTATIONS
def test_rms_norms_lose_their_gamma(rotate):
    _, report = check_exact(randomized(ViT(norm=nn.RMSNorm)), IMAGES, rotate=rotate)
    assert set(lefts(report).values()) == {PLAIN} and bool(report.streams) == bool(rotate)
    assert not any(stream.is_centered for stream in report.streams)


@pytest.mark.parametrize('rotate, gamma', [(None, 'none'), ('hadamard', 'some'), ('hadamard', 'all')])
def test_swin_with_padded_windows_and_patch_merging(rotate, gamma):
    """timm's parts of a merged token are side by side; images of 28 and 36 pixels pad windows."""
    swin = timm.create_model('swin_tiny_patch4_window7_224', img_size=56, embed_dim=8, depths=(2, 2, 1),
                             num_heads=(1, 2, 4), window_size=5, num_classes=5)
    x = torch.randn(1, 3, 56, 56)
    folded, report = check_exact(randomized(swin, gamma=gamma), x, rotate=rotate)
    assert lefts(report).get('patch_embed.norm') == (f'{PLAIN}, and a linear layer' if rotate else None)
    assert lefts(report)['layers.1.downsample.norm'] == lefts(report)['layers.0.blocks.1.norm2'] == PLAIN
    norm = folded.layers[0].blocks[0].norm1
    assert norm.is_padded and norm.bias.eq(1).all() and not norm.is_centered and len(report.streams) == 3 * bool(rotate)
    # The stock blocks pad with zeros, as before: nothing of them is replaced.
    assert type(folded.layers[0].blocks[0]) is type(swin.layers[0].blocks[0])


@ROTATIONS
def test_merged_tokens_whose_channels_alternate(rotate):
    model = randomized(models.swin_classifier(norm_cfg=models.LN))
    _, report = check_exact(model, torch.randn(1, 3, 36, 28), example=None, rotate=rotate)
    assert len(report.reduced) == 11 - (rotate is None)
    assert lefts(report)['backbone.stages.0.downsample.norm'] == PLAIN and len(report.streams) == 2 * bool(rotate)


class PaddedConvolution(nn.Module):
    """A norm before a convolution that pads with zeros, and one before windows that a model pads by itself."""

    def __init__(self, width=8):
        super().__init__()
        self.embed, self.norm1, self.norm2 = nn.Linear(6, width), nn.LayerNorm(width), nn.LayerNorm(width)
        self.conv, self.head = nn.Conv1d(width, width, 3, padding=1), nn.Linear(width, 3)

    def forward(self, x):
        x = self.embed(x)
        x = x + self.conv(self.norm1(x).mT).mT
        return self.head(nn.functional.pad(self.norm2(x), (0, 0, 0, -x.shape[1] % 4)).unflatten(1, (-1, 4))).mean(2)


@ROTATIONS
def test_zeros_of_padding_are_told_from_tokens(rotate):
    folded, report = check_exact(randomized(PaddedConvolution(), gamma='some'), torch.randn(2, 5, 6), rotate=rotate)
    assert folded.norm1.is_padded and folded.norm2.is_padded and not report.kept
    allow_partial_calls(folded)
    torch.testing.assert_close(folded.norm1(torch.randn(2, 8)).mean(-1), torch.ones(2))


@ROTATIONS
def test_other_values_than_zeros_among_the_tokens_keep_the_norm(rotate):
    class Ones(PaddedConvolution):
        def forward(self, x):
            x = self.norm1(self.embed(x))
            return self.head(torch.cat((torch.ones_like(x[:, :1]), x), 1))

    report = fuse_norms(randomized(Ones()), example=torch.randn(2, 5, 6), rotate=rotate)
    assert report.kept[0].norm == 'norm1' and report.kept[0].obstacle.cause.code == 'mixed'


def test_streams_of_offline_norms_are_rotated_on_request():
    model = randomized(replace_norms(ViT(), dict(type='UN')))
    _, plain = check_exact(model, IMAGES, strict=True)
    folded, report = check_exact(model, IMAGES, strict=True, rotate='hadamard')
    assert not plain.streams and len(report.streams) == 1 and not report.reduced
    assert not report.streams[0].is_centered and not torch.equal(folded.token, model.token)


def test_a_stream_of_an_offline_norm_that_the_verification_keeps_stays():
    model = randomized(replace_norms(ViT(), dict(type='UN')))
    scale, shift = model.blocks[1].norm1.affine()
    model.blocks[1].norm1.affine = lambda: (1.01 * scale, shift)
    _, report = check_exact(model, IMAGES, rotate='hadamard')
    assert [fold.norm for fold in report.kept] == ['blocks.1.norm1'] and not report.streams


def test_streams_of_offline_norms_with_padded_windows_are_rotated():
    _, report = check_exact(randomized(models.swin_classifier()), torch.randn(1, 3, 36, 28), rotate='hadamard')
    assert len(report.streams) == 2 and any(fold.pads for fold in report.folded)


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

    _, report = check_exact(randomized(Two()), torch.randn(3, 4, 6), rotate='hadamard')
    assert len(report.streams) == 1 and set(report.streams[0].norms) == {'norm_a', 'norm_b', 'norm'}


def test_shared_writers_stay():
    model = randomized(ViT())
    model.blocks[1].fc2.weight = model.blocks[0].fc2.weight
    _, report = check_exact(model, IMAGES, rotate='hadamard')
    assert not report.streams and report.reduced[0].not_rotated.code in ('shared', 'parts')


def test_post_norm_stays():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0)
    report = fuse_norms(randomized(layer), example=torch.randn(2, 5, 8), rotate='hadamard')
    assert not report.streams and len(report.kept) == 2


@ROTATIONS
def test_torchs_pre_norm_encoder_runs_its_folded_norms(rotate):
    """torch's fast path would read the weights of the norms."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True, dropout=0)
    encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(8), enable_nested_tensor=False)
    model = randomized(nn.Sequential(nn.Linear(6, 8), encoder, nn.Linear(8, 3)))
    _, report = check_exact(model, torch.randn(2, 5, 6), rotate=rotate)
    assert set(lefts(report).values()) == {PLAIN} and len(report.reduced) == 5
    assert report.attentions == (4 if rotate else 0) and len(report.streams) == bool(rotate)


def test_how_far_layer_norms_go():
    model = randomized(ViT())
    report = fuse_norms(model, example=IMAGES, layer_norms='keep')
    assert {fold.obstacle.code for fold in report.kept} == {'kept on request'} and len(report.kept) == 5
    with pytest.raises(NotFoldedError, match='computes its statistics at inference'):
        fuse_norms(model, example=IMAGES, strict=True)
    assert type(model.norm) is nn.LayerNorm


@pytest.mark.parametrize('kwargs', [dict(layer_norms='all'), dict(rotate='hadamar'), dict(rotate=True),
                                    dict(rotate='hadamard', layer_norms='keep')])
def test_wrong_choices(kwargs):
    with pytest.raises(ValueError, match=next(iter(kwargs))):
        fuse_norms(ViT().eval(), example=IMAGES, **kwargs)


def test_in_inference_mode_as_much_is_folded_and_folding_twice_changes_nothing():
    model = randomized(ViT())
    with torch.inference_mode():
        report = fuse_norms(model, example=IMAGES, rotate='hadamard')
    assert set(lefts(report).values()) == {PLAIN} and len(report.streams) == 1
    state = copy.deepcopy(model.state_dict())
    report = fuse_norms(model, example=IMAGES)
    assert not (report.reduced or report.folded or report.kept or report.streams)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


@ROTATIONS
def test_saved_and_loaded(rotate, tmp_path):
    swin = timm.create_model('swin_tiny_patch4_window7_224', img_size=32, embed_dim=8, depths=(1, 1),
                             num_heads=(1, 2), window_size=4, num_classes=5)
    fresh, x = copy.deepcopy(swin), torch.randn(1, 3, 32, 32)
    report = fuse_norms(randomized(swin), rotate=rotate)
    save_folded(swin, tmp_path / 'folded.pth', report=report)
    loaded = load_folded(tmp_path / 'folded.pth', fresh)
    assert torch.equal(loaded(x), swin(x))
    assert sum(isinstance(m, FoldedLayerNorm) for m in loaded.modules()) == len(report.reduced) == 6 + bool(rotate)
    for stream, expected in zip(streams_of(loaded), report.streams, strict=True):
        assert (stream.norms, stream.is_centered) == (expected.norms, expected.is_centered)
        assert torch.equal(stream.basis, expected.basis)


@pytest.mark.parametrize('width', [1, 2, 8, 12, 96, 45])
def test_bases(width):
    basis, one = rotation(width, 3), torch.ones(width).double()
    for matrix in (basis, head_rotation(width, 3)):
        torch.testing.assert_close(matrix @ matrix.mT, torch.eye(width).double(), rtol=0, atol=1e-12)
    torch.testing.assert_close(basis @ one, one, rtol=0, atol=1e-12)
    x = torch.randn(3, width).double()
    torch.testing.assert_close(nn.functional.layer_norm(x @ basis.mT, (width, )),
                               nn.functional.layer_norm(x, (width, )) @ basis.mT, rtol=0, atol=1e-9)
    if width > 2:
        assert (basis - torch.eye(width)).abs().max() > 0.1  # it does rotate
