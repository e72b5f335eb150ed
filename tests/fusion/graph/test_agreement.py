"""Graph and rules say the same, wherever both know a model; and either way gives the same function."""
import copy

import pytest
import torch

from mmunorm import fuse_norms
from mmunorm.fusion import rules
from mmunorm.fusion.check import check
from mmunorm.fusion.find import find
from mmunorm.fusion.graph import look

from .. import models

PICTURES = torch.randn(1, 3, 32, 32, dtype=torch.float64)
MODELS = {
    'swin': models.swin_classifier,
    'stock_swin': models.stock_swin_classifier,
    't2t': models.t2t_classifier,
    'vit': models.vit_classifier,
    'vit_avg': lambda: models.vit_classifier(out_type='avg_featmap'),
    'deit': models.deit_classifier,
    'detector': models.detector,
    'mmdet_swin': models.mmdet_detector,
    'timm_swin': models.timm_swin,
    'timm_vit': lambda: models.timm_vit(scale_attn_norm=True, scale_mlp_norm=True),
    'timm_vit_avg': lambda: models.timm_vit(global_pool='avg', fc_norm=False),
    'timm_vit_max': lambda: models.timm_vit(global_pool='max', fc_norm=False),
    'timm_deit': lambda: models.timm_model('deit_tiny_distilled_patch16_224'),
}


def places(sites):
    return sorted((site.layer, site.after) for site in sites)


@pytest.mark.parametrize('name', MODELS)
def test_graph_and_rules_agree(name, monkeypatch):
    model = models.randomize(MODELS[name]().double())
    found = look(model, PICTURES)
    folds = find(model)
    check(model, folds)
    for fold in folds:
        sites, why = found[fold.norm]
        if fold.obstacle or sites:
            assert places(sites) == ([] if fold.obstacle else places(fold.sites)), (fold.norm, fold.obstacle)
        else:  # rules can fill padding up
            assert fold.pads and 'padd' in why, (fold.norm, why)
    before = models.outputs(model, PICTURES)
    ruled = copy.deepcopy(model)
    fuse_norms(ruled)
    monkeypatch.setattr(rules, '_RULES', {})
    report = fuse_norms(model, example=PICTURES)
    assert len(report.folded) == sum(bool(sites) for sites, _ in found.values()) > 0
    for each in (model, ruled):
        models.assert_equal(models.outputs(each, PICTURES), before)
