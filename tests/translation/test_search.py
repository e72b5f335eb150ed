"""Beam search with cached keys and values against a slow search over the full prefix, and against transformers."""
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from mmunorm.translation.search import CachedDecoder, beam_search
from mmunorm.translation.text.ids import BOS, EOS, PAD
from mmunorm.translation.transformer import sinusoids

from .models import VOCABULARY, randomize, sentences, task


def searched(seed, scheme='PreNorm', norm='LN', end=1., **kwargs):
    """A model whose next tokens are far from equally likely; the end is more so by `end`."""
    torch.manual_seed(seed)
    model = randomize(task(scheme, norm, **kwargs), seed).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith('weight') and parameter.dim() == 2:
                parameter.mul_(1.5)
    model.backbone.output.bias = nn.Parameter(torch.zeros(VOCABULARY, dtype=torch.float64))
    model.backbone.output.bias.data[EOS] = end
    return model


@torch.no_grad()
def log_probabilities(model, source, prefixes):
    """Of what comes behind each of some prefixes of one length."""
    tokens = torch.tensor([[BOS, *prefix] for prefix in prefixes])
    logits = model.backbone(source.expand(len(prefixes), -1), tokens)[:, -1]
    return (logits - logits.logsumexp(1, keepdim=True)).tolist()


def slow_search(model, source, beam, power):
    """Hypotheses of one sentence, the best first: each step runs the whole prefix of each of them."""
    limit = 2 * int(source.ne(PAD).sum()) + 20
    live, finished = [(0., [])], []
    for length in range(1, limit + 1):
        steps = []
        rows = log_probabilities(model, source, [prefix for _, prefix in live])
        for (total, prefix), values in zip(live, rows, strict=True):
            allowed = [EOS] if length == limit else [token for token in range(VOCABULARY) if token not in (PAD, BOS)]
            steps += [(total + values[token], prefix, token) for token in allowed]
        steps.sort(key=lambda step: -step[0])
        finished += [(total / length**power, prefix) for total, prefix, token in steps[:beam] if token == EOS]
        if len(finished) >= beam:
            break
        live = [(total, [*prefix, token]) for total, prefix, token in steps[:2 * beam] if token != EOS][:beam]
    return sorted(finished, key=lambda hypothesis: -hypothesis[0])[:beam]


@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 10**6), beam=st.integers(1, 4), power=st.sampled_from([0., 0.6, 1., 1.4]),
       end=st.sampled_from([0., 2., 4.]), scheme=st.sampled_from(['PreNorm', 'BranchNorm', 'SubLN', 'DLCL']))
def test_equals_a_slow_search_over_the_full_prefix(seed, beam, power, end, scheme):
    model = searched(seed, scheme, 'UN', end, beam=beam, length_penalty=power)
    source = sentences(1, 4, 2, seed=seed)
    expected = [slow_search(model, row, beam, power) for row in source]
    for found, slow in zip(model.translate(source), expected, strict=True):
        assert [words for _, words in found] == [words for _, words in slow]
        assert [score for score, _ in found] == pytest.approx([score for score, _ in slow], rel=1e-9)


def test_a_beam_of_one_is_greedy_search():
    model = searched(3, end=-1., beam=1)
    source, = sentences(4)
    (score, words), = model.translate(source[None])[0]
    prefix, total = [], 0.
    while not prefix or prefix[-1] != EOS:
        values, = log_probabilities(model, source, [prefix])
        prefix.append(max((token for token in range(VOCABULARY) if token not in (PAD, BOS)), key=values.__getitem__)
                      if len(prefix) < 27 else EOS)
        total += values[prefix[-1]]
    assert words == prefix[:-1] and score == pytest.approx(total / len(prefix))


def test_the_keys_of_the_source_are_computed_once():
    model = searched(0, end=-9.)
    calls = []
    model.backbone.decoder[0].cross_attn.kv.register_forward_hook(lambda *_: calls.append(1))
    source = sentences(5, 3)
    decoder = CachedDecoder(model.backbone, source)
    beam_search(decoder, [6, 9], 4, 1.)
    assert len(calls) == 1
    # A sentence that is finished takes no more time.
    assert decoder.cache[0]['self'][0].shape[:3:2] == (4, 9) and len(decoder.memory.tokens) == 1


def test_a_translation_ends_at_its_limit():
    model = searched(0, end=-50.)
    lengths = [len(hypotheses[0][1]) for hypotheses in model.translate(sentences(2, 5))]
    assert lengths == [2 * 2 + 20 - 1, 2 * 5 + 20 - 1]


def test_what_cannot_be_computed_gives_nothing():
    model = searched(0)
    with torch.no_grad():
        model.backbone.output.bias.fill_(math.nan)
    assert model.translate(sentences(2, 3)) == [[(-math.inf, [])]] * 2


@pytest.fixture
def _double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures('_double')
def test_equals_transformers_marian():
    transformers = pytest.importorskip('transformers')
    torch.manual_seed(1)
    size = dict(d_model=16, max_position_embeddings=64, activation_function='silu', dropout=0., scale_embedding=True)
    for side, layers in (('encoder', 2), ('decoder', 3)):
        size.update({f'{side}_layers': layers, f'{side}_ffn_dim': 24, f'{side}_attention_heads': 2})
    marian = transformers.MarianMTModel(transformers.MarianConfig(
        vocab_size=VOCABULARY, pad_token_id=PAD, decoder_start_token_id=BOS, eos_token_id=EOS, forced_eos_token_id=None,
        init_std=0.4, **size)).eval().double()
    with torch.no_grad():
        marian.model.shared.weight.mul_(0.3)
        marian.final_logits_bias[0, EOS] = 1.2

    model = task('PostNorm', 'LN', act_cfg=dict(type='SiLU')).eval()
    backbone = model.backbone
    backbone.output.bias = nn.Parameter(marian.final_logits_bias[0])
    backbone.embedding.weight.data = marian.model.shared.weight.data
    backbone.output.weight = backbone.embedding.weight
    with torch.no_grad():
        for layer, other in zip([*backbone.encoder, *backbone.decoder],
                                [*marian.model.encoder.layers, *marian.model.decoder.layers], strict=True):
            take_marians_layer(layer, other)
        # Marian's own table is in single precision.
        for side in (marian.model.encoder, marian.model.decoder):
            torch.testing.assert_close(side.embed_positions.weight, sinusoids(64, 16), rtol=0, atol=1e-6)
            side.embed_positions.weight.copy_(sinusoids(64, 16))

        source, target = sentences(6, 3, 8), sentences(5, 7, 4, seed=1)
        logits = marian(source, attention_mask=source.ne(PAD), decoder_input_ids=target).logits
        torch.testing.assert_close(backbone(source, target)[target != PAD], logits[target != PAD], rtol=0, atol=1e-10)
        found = beam_search(CachedDecoder(backbone, source), [39] * 3, 4, 1.)
        for row, hypotheses in zip(source, found, strict=True):
            theirs = marian.generate(  # a padded batch of this release's gives other numbers than its `forward`
                row[row != PAD][None], num_beams=4, num_return_sequences=4, max_length=40, do_sample=False,
                early_stopping=True, length_penalty=1., suppress_tokens=[PAD, BOS], output_scores=True,
                return_dict_in_generate=True)
            assert [[BOS, *words, EOS] for _, words in hypotheses] == [
                [token for token in ids if token != PAD] for ids in theirs.sequences.tolist()]
            assert [score for score, _ in hypotheses] == pytest.approx(theirs.sequences_scores.tolist(), rel=1e-6)
    lengths = {len(words) for hypotheses in found for _, words in hypotheses}
    assert len(lengths) > 3 and max(lengths) < 38


def take_marians_layer(layer, other):
    attentions = [(layer.attn, other.self_attn)]
    norms = [(layer.norm1, other.self_attn_layer_norm), (getattr(layer, layer.norm_names[-1]), other.final_layer_norm)]
    if hasattr(layer, 'cross_attn'):
        attentions.append((layer.cross_attn, other.encoder_attn))
        norms.append((layer.norm2, other.encoder_attn_layer_norm))
    for mine, theirs in attentions:
        for name in ('weight', 'bias'):
            q, k, v = (getattr(getattr(theirs, f'{part}_proj'), name) for part in 'qkv')
            if hasattr(mine, 'qkv'):
                getattr(mine.qkv, name).copy_(torch.cat([q, k, v]))
            else:
                getattr(mine.q, name).copy_(q)
                getattr(mine.kv, name).copy_(torch.cat([k, v]))
        mine.out.load_state_dict(theirs.out_proj.state_dict())
    for mine, theirs in [*norms, (layer.ffn.fc1, other.fc1), (layer.ffn.fc2, other.fc2)]:
        mine.load_state_dict(theirs.state_dict())
