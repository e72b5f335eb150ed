"""Graph and rules say the same, wherever both know a model; and either way gives the same function."""
import copy

import pytest
import torch

from mmunorm import fuse_norms
from mmunorm.fusion import registry
from mmunorm.fusion.fuse import plan
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
    'mmdet_swin': lambda: models.detector(backbone=models.mmdet_swin()),
    'timm_swin': lambda: models.timm_model('swin_tiny_patch4_window7_224'),
    'timm_vit': lambda: models.timm_model('vit_tiny_patch16_224', scale_attn_norm=True, scale_mlp_norm=True),
    'timm_vit_avg': lambda: models.timm_model('vit_tiny_patch16_224', global_pool='avg', fc_norm=False),
    'timm_vit_max': lambda: models.timm_model('vit_tiny_patch16_224', global_pool='max', fc_norm=False),
    'timm_deit': lambda: models.timm_model('deit_tiny_distilled_patch16_224'),
}


def where(place):
    return ('behind ' if place.sites[0].behind else '') + ', '.join(sorted(site.layer for site in place.sites))


@pytest.mark.parametrize('name', MODELS)
def test_graph_and_rules_agree(name, monkeypatch):
    model = models.randomize(MODELS[name]().double())
    places = look(model, PICTURES)
    for fold in plan(model):
        place = places[fold.norm]
        if not fold.obstacle and place.sites:
            readers = sorted(fold.readers) or [fold.source]
            assert where(place) == ('behind ' if fold.source else '') + ', '.join(readers)
        elif not fold.obstacle:
            # Rules can fill padding up, and may know readers of outputs that the forward pass of tensors never sees.
            assert fold.pads and 'padd' in place.why, (fold.norm, place.why)
        else:
            assert not place.sites, (fold.norm, fold.obstacle)
    before = models.outputs(model, PICTURES)
    ruled = copy.deepcopy(model)
    fuse_norms(ruled)
    monkeypatch.setattr(registry, '_RULES', {})
    report = fuse_norms(model, example=PICTURES)
    assert len(report.folded) == sum(bool(place.sites) for place in places.values()) > 0
    for each in (model, ruled):
        models.assert_equal(models.outputs(each, PICTURES), before)
