"""The network against torch's own, with padding, schemes and sizes."""
import copy
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from mmunorm.norms import Norm
from mmunorm.utils import PreflightError
from projects.deep.deep.residuals import count_updates, profile_admin
from projects.deep.deep.residuals.sublayer import describe
from projects.translation.translation.model import shifted
from projects.translation.translation.text.ids import PAD

from .models import ARCH, SCHEMES, VOCABULARY, WITHOUT_NORM, sentences, task, transformer


def torch_transformer(model, norm_first):
    """torch.nn.Transformer with the weights of a model."""
    width = ARCH['embed_dims']
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # about its fast path
        other = nn.Transformer(width, ARCH['num_heads'], ARCH['encoder_layers'], ARCH['decoder_layers'],
                               ARCH['feedforward_channels'], 0., batch_first=True, norm_first=norm_first).double()
    with torch.no_grad():
        for stack in ('encoder', 'decoder'):
            mine, theirs = getattr(model, stack), getattr(other, stack)
            for layer, copied in zip(mine, theirs.layers, strict=True):
                copied.self_attn.in_proj_weight.copy_(layer.attn.qkv.weight)
                copied.self_attn.in_proj_bias.copy_(layer.attn.qkv.bias)
                copied.self_attn.out_proj.load_state_dict(layer.attn.out.state_dict())
                if stack == 'decoder':
                    cross = layer.cross_attn
                    copied.multihead_attn.in_proj_weight.copy_(torch.cat([cross.q.weight, cross.kv.weight]))
                    copied.multihead_attn.in_proj_bias.copy_(torch.cat([cross.q.bias, cross.kv.bias]))
                    copied.multihead_attn.out_proj.load_state_dict(cross.out.state_dict())
                copied.linear1.load_state_dict(layer.ffn.fc1.state_dict())
                copied.linear2.load_state_dict(layer.ffn.fc2.state_dict())
                for name in layer.norm_names:
                    getattr(copied, name).load_state_dict(getattr(layer, name).state_dict())
            final = getattr(model, f'{stack}_norm')
            theirs.norm = copy.deepcopy(final) if norm_first else None
    return other


def positions(length):
    """The formula of the paper, one number after the other."""
    half = ARCH['embed_dims'] // 2
    rows = [[function(position / 10000**(i / half)) for function in (math.sin, math.cos) for i in range(half)]
            for position in range(length)]
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize('scheme', ['PreNorm', 'PostNorm'])
def test_equals_torchs_transformer_forward_and_backward(scheme):
    model = transformer(scheme, 'LN')
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    other = torch_transformer(model, scheme == 'PreNorm')
    source, target = sentences(5, 7, 2), shifted(sentences(6, 3, 4, seed=1))

    def embedded(tokens):
        return F.embedding(tokens, model.embedding.weight) * 4 + positions(tokens.shape[1])

    causal = nn.Transformer.generate_square_subsequent_mask(target.shape[1], dtype=torch.float64)
    y = other(embedded(source), embedded(target), tgt_mask=causal, src_key_padding_mask=source == PAD,
              memory_key_padding_mask=source == PAD)
    expected = y @ model.embedding.weight.T
    actual = model(source, target)
    real = target != PAD
    torch.testing.assert_close(actual[real], expected[real], rtol=0, atol=1e-12)
    gradient, = torch.autograd.grad(expected[real].square().sum(), [model.embedding.weight])
    actual[real].square().sum().backward()
    torch.testing.assert_close(model.embedding.weight.grad, gradient, rtol=1e-9, atol=1e-9)


@settings(max_examples=8, deadline=None)
@given(scheme=st.sampled_from(SCHEMES), norm=st.sampled_from(['UN', 'TokenBN', 'MABN', 'PN']),
       lengths=st.lists(st.integers(1, 6), min_size=1, max_size=3),
       more=st.tuples(st.integers(0, 4), st.integers(1, 4)), seed=st.integers(0, 1000))
def test_more_padding_changes_nothing_to_the_last_bit(scheme, norm, lengths, more, seed):
    torch.manual_seed(seed)
    kwargs = {} if scheme in WITHOUT_NORM or norm == 'TokenBN' else dict(norm_cfg=dict(type=norm, warmup_iters=1))
    model = task(scheme, norm, **kwargs)
    count_updates(model, torch.optim.SGD(model.parameters(), lr=0.1))
    other = copy.deepcopy(model)
    source, target = sentences(*lengths, seed=seed), sentences(*lengths[::-1], seed=seed + 1)
    for _ in range(2):
        loss = model(source, target, mode='loss')
        padded = other(F.pad(source, (0, more[0])), F.pad(target, (0, more[1])), mode='loss')
        assert torch.equal(loss['loss'], padded['loss'])
        loss['loss'].backward()
        padded['loss'].backward()
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)
    for mine, theirs in zip(model.buffers(), other.buffers(), strict=True):
        assert torch.equal(mine, theirs)
    with torch.no_grad():
        assert torch.equal(model(source, target), other(F.pad(source, (0, more[0])), F.pad(target, (0, more[1]))))


@pytest.mark.parametrize('scheme', SCHEMES)
def test_the_mask_of_the_real_tokens_reaches_every_norm(scheme):
    model = transformer(scheme, **({} if scheme in WITHOUT_NORM else dict(norm_cfg=dict(type='UN', warmup_iters=1))))
    count_updates(model, torch.optim.SGD(model.parameters(), lr=0.1))
    source, target = sentences(5, 7, 2), shifted(sentences(6, 3, 4, seed=1))
    norms, masks = {name: module for name, module in model.named_modules() if isinstance(module, Norm)}, {}
    for name, norm in norms.items():
        norm.register_forward_pre_hook(lambda _, args, name=name: masks.update({name: args[1]}))
    model(source, target)
    assert masks.keys() == norms.keys()
    for name, mask in masks.items():
        assert torch.equal(mask, (source if name.startswith('encoder') else target) == PAD)


N, M = 3, 2
GAINS = {  # of v, out, fc1 and fc2, in the encoder and in the decoder
    'DeepNorm': (0.87 * (N**4 * M)**(-1 / 16), (12 * M)**(-1 / 4)),
    'BranchNorm': (0.87 * (N**4 * M)**(-1 / 16), (12 * M)**(-1 / 4)),
    'SubLN': (math.sqrt(math.log(3 * M) * math.log(2 * N) / 3), math.sqrt(math.log(3 * M))),
    'TFixup': (0.67 * N**(-1 / 4), (9 * M)**(-1 / 4)),
    'PostNorm': (1, 1),
    'PreNorm': (1, 1),
}


@pytest.mark.parametrize('scheme', GAINS)
def test_initial_weights_by_role(scheme):
    arch = dict(encoder_layers=N, decoder_layers=M, embed_dims=96, feedforward_channels=192, num_heads=2)
    model = transformer(scheme, arch=arch, vocab_size=500)
    model.init_weights()
    for layers, expected in zip((model.encoder, model.decoder), GAINS[scheme], strict=True):
        for layer in layers:
            for part in layer.part_names:
                sublayer = describe(getattr(layer, part))
                weights = sublayer.weights()
                assert weights.keys() == ({'fc1', 'fc2'} if part == 'ffn' else {'q', 'k', 'v', 'out'})
                assert not any(bias.any() for bias in sublayer.biases())
                for role, weight in weights.items():
                    gain = weight.std().item() / (2 / sum(weight.shape))**0.5
                    assert gain == pytest.approx(1 if role in 'qk' else expected, rel=0.05), (part, role)
    scale = (9 * N)**(-1 / 4) if scheme == 'TFixup' else 1
    assert model.embedding.weight.std().item() == pytest.approx(scale * 96**-0.5, rel=0.02)
    assert model.output.weight is model.embedding.weight


def test_r_fixup_counts_the_sublayers_of_both_stacks():
    model = transformer('RFixup', arch={**ARCH, 'encoder_layers': N, 'decoder_layers': M})
    sublayers = 2 * N + 3 * M
    for layer in (*model.encoder, *model.decoder):
        for residual, _, _ in layer.sublayers():
            connection = getattr(layer, residual)
            assert connection.gain == 1
            assert connection.gains == dict(q=sublayers**(-1 / 6), k=sublayers**(-1 / 6), v=sublayers**(-1 / 6),
                                            out=0, fc1=sublayers**(-1 / 2), fc2=0)


def test_the_streams_of_deep_norm_have_the_weights_of_their_stacks():
    model = transformer('DeepNorm', 'LN', arch={**ARCH, 'encoder_layers': N, 'decoder_layers': M})
    for layers, expected in ((model.encoder, 0.81 * (N**4 * M)**(1 / 16)), (model.decoder, (3 * M)**(1 / 4))):
        for layer in layers:
            for residual, _, _ in layer.sublayers():
                assert getattr(layer, residual).scales() == (pytest.approx(expected), None)


def test_the_sublayers_of_a_decoder_layer_share_re_zeros_gain():
    model = transformer('ReZero')
    assert len([name for name, _ in model.named_parameters() if name.endswith('gain')]) == 5
    layer = model.decoder[0]
    assert layer.residual3.scales()[1] is layer.residual2.scales()[1] is layer.residual1.gain


def test_admin_measures_real_tokens_and_each_stack_by_itself():
    source, target = sentences(5, 7, 2), shifted(sentences(6, 3, 4, seed=1))
    model = transformer('Admin', 'LN')
    longer = copy.deepcopy(model)
    profile_admin(model, lambda: model(source, target))
    for first in (model.encoder[0].residual1, model.decoder[0].residual1):
        assert torch.equal(first.weight, torch.ones_like(first.weight))
    # In the encoder, padded tokens have values; a single row has no padding.
    values = []
    longer.encoder[0].residual1.drop.register_forward_pre_hook(lambda _, args: values.append(args[0].flatten()))
    with torch.no_grad():
        for row, length in enumerate((5, 7, 2)):
            longer.encode(source[row:row + 1, :length])
    expected = torch.cat(values).var(correction=0).item()
    assert model.encoder[0].residual2.weight[0].item()**2 == pytest.approx(expected)


@pytest.mark.parametrize('kwargs, message', [
    (dict(arch='huge'), "arch must be one of 'small', 'base', 'big' or a dict, got 'huge'"),
    (dict(arch=dict(embed_dims=8)), 'arch must have encoder_layers, decoder_layers, .*, got embed_dims'),
    (dict(arch={**ARCH, 'num_heads': 3}), 'embed_dims must be even and a multiple of num_heads=3, got 16'),
    (dict(arch={**ARCH, 'decoder_layers': 0}), 'arch: decoder_layers must be an int of at least 1, got 0'),
    (dict(vocab_size=4), 'vocab_size must be an int of at least 5, got 4')])
def test_wrong_arguments(kwargs, message):
    with pytest.raises(ValueError, match=message):
        transformer(**kwargs)


def test_a_row_of_padding_and_another_vocabulary_are_refused():
    with pytest.raises(ValueError, match='source: each row must have a token, but row 1 has only padding'):
        transformer().encode(torch.tensor([[5, 3], [0, 0]]))
    with pytest.raises(PreflightError, match=f'vocabulary of {VOCABULARY} tokens, but the config has vocab_size=13'):
        transformer(vocab_size=13).load_state_dict(transformer().state_dict())
