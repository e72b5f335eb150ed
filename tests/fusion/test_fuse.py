"""fuse_norms: the folded model is the unfolded one, for every block, size, scale and dtype."""

import pytest
import torch

from mmunorm import fuse_norms
from mmunorm.fusion import is_norm

from . import models


def outputs(model, x):
    """What a model computes for `x`, as a list of tensors."""
    with torch.no_grad():
        out = model.extract_feat(x) if hasattr(model, 'bbox_head') else model(x)
    return list(out) if isinstance(out, (tuple, list)) else [out]


def assert_folds(model, x, count, rtol=1e-9):
    """Folds all `count` norms; outputs in float64 stay, however ill-conditioned the network is."""
    model = models.randomize(model.double())
    x = x.double()
    before = outputs(model, x)
    report = fuse_norms(model, strict=True)
    after = outputs(model, x)
    assert len(report.folded) == count and not report.kept
    assert not any(map(is_norm, model.modules()))
    for a, b in zip(before, after, strict=True):
        torch.testing.assert_close(b, a, rtol=rtol, atol=rtol * a.abs().max().item())


@pytest.mark.parametrize('norm', ['UN'])
@pytest.mark.parametrize('make, count', [
    (models.swin_classifier, 11),
    (models.t2t_classifier, 9),
    (models.vit_classifier, 5),
])
def test_classifiers(make, count, norm):
    torch.manual_seed(0)
    assert_folds(make(norm), torch.randn(2, 3, 32, 32), count)
