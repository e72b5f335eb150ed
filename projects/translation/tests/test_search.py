"""Beam search with cached keys and values against a slow search over the full prefix."""
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from projects.translation.translation.search import CachedDecoder, beam_search
from projects.translation.translation.text.ids import BOS, EOS, PAD

from .models import VOCABULARY, randomize, sentences, task


def searched(seed, scheme='PreNorm', norm='LN', end=1., **kwargs):
    """A model with peaked distributions of the next token; `end` is added to the logit of EOS."""
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
    """Logits after each of several prefixes of the same length."""
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


def test_the_keys_of_the_source_are_computed_once():
    model = searched(0, end=-9.)
    calls = []
    model.backbone.decoder[0].cross_attn.kv.register_forward_hook(lambda *_: calls.append(1))
    source = sentences(5, 3)
    decoder = CachedDecoder(model.backbone, source)
    beam_search(decoder, [6, 9], 4, 1.)
    assert len(calls) == 1
    # A finished sentence costs nothing.
    assert decoder.cache[0]['self'][0].shape[:3:2] == (4, 9) and len(decoder.memory.tokens) == 1


def test_a_translation_ends_at_its_limit():
    model = searched(0, end=-50.)
    lengths = [len(hypotheses[0][1]) for hypotheses in model.translate(sentences(2, 5))]
    assert lengths == [2 * 2 + 20 - 1, 2 * 5 + 20 - 1]


def test_no_hypotheses_of_nan():
    model = searched(0)
    with torch.no_grad():
        model.backbone.output.bias.fill_(math.nan)
    assert model.translate(sentences(2, 3)) == [[(-math.inf, [])]] * 2
