"""Offline norms fold into the Transformer: the same numbers and translations, and no norm left."""
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmunorm import fuse_norms
from mmunorm.norms.layers import is_norm

from .models import SCHEMES, WITHOUT_NORM, randomize, sentences, task


def assert_folds(model, kept=()):
    source, target = sentences(6, 3, 8), sentences(5, 7, 4, seed=1)
    model.extra_length = 0
    real = target != 0
    with torch.no_grad():
        logits, translations = model(source, target), model(source, mode='predict')
        report = fuse_norms(model, strict=not kept)
        folded = model(source, target)
    assert {name for name, module in model.named_modules() if is_norm(module)} == set(kept)
    torch.testing.assert_close(folded[real], logits[real], rtol=0, atol=1e-9 * logits.abs().max().item())
    for before, after in zip(translations, model(source, mode='predict'), strict=True):
        assert all(map(torch.equal, before['hypotheses'], after['hypotheses']))
        assert after['scores'] == pytest.approx(before['scores'], rel=1e-9)
    return {fold.norm: fold.where for fold in report.folded}


@pytest.mark.parametrize('scheme', sorted(set(SCHEMES) - {'DLCL'}))
def test_every_norm_of_every_scheme_folds(scheme):
    model = randomize(task(scheme, beam=2)).eval()
    embedding = model.backbone.embedding.weight.clone()
    where = assert_folds(model)
    memory = ', '.join(f'backbone.decoder.{i}.cross_attn.kv' for i in range(3))
    last = ('backbone.encoder.1.norm2', 'backbone.decoder.2.norm3')
    if 'backbone.encoder_norm' in where:
        last = ('backbone.encoder_norm', 'backbone.decoder_norm')
        if scheme != 'ResPostNorm':  # its norms are at the ends of the branches
            assert where['backbone.decoder.1.norm2'] == 'backbone.decoder.1.cross_attn.q'
    assert where[last[0]] == memory
    assert where[last[1]] == 'backbone.output (with a copy of its shared weight)'
    assert torch.equal(model.backbone.embedding.weight, embedding)
    assert not torch.equal(model.backbone.output.weight, embedding) or scheme in WITHOUT_NORM


@settings(max_examples=3, deadline=None)
@given(scheme=st.sampled_from(['PreNorm', 'PostNorm', 'DeepNorm', 'BranchNorm', 'Admin']), seed=st.integers(0, 10**6),
       norm=st.sampled_from(['UN', 'TokenBN', 'RepBN', 'MABN']))
def test_folding_is_exact_for_any_statistics(scheme, seed, norm):
    torch.manual_seed(seed)
    assert_folds(randomize(task(scheme, norm, beam=2), seed).eval())


def test_norms_whose_outputs_are_mixed_are_kept():
    model = randomize(task('DLCL', beam=2)).eval()
    assert_folds(model, [name for name, _ in model.named_modules() if name.endswith('mix_norm')])
