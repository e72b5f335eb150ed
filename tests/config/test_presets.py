import pytest
from mmengine.config import Config

from mmunorm.cli.arguments import load_config
from mmunorm.config.presets import NORMS, apply_norm, parse_preset, set_norm, slug
from mmunorm.registry import MODELS


@pytest.mark.parametrize(('text', 'name', 'norm_cfg'), [
    ('BN', 'BN', dict(type='TokenBN')),
    ('PN*', 'PN*', dict(type='PN', layer_scale=False)),
    ('UN-nofilter', 'UN-nofilter', dict(type='UN', outlier_filter=False)),
    ('big=UN,window=8,alpha=0.5,forward_average=current', 'big',
     dict(type='UN', window=8, alpha=0.5, forward_average='current'))])
def test_parse_preset(text, name, norm_cfg):
    assert parse_preset(text) == (name, norm_cfg)


def config(tmp_path, norm="dict(type='UN', window=8, alpha=0.5, warmup_iters=7)", name='swin_un_detector'):
    (tmp_path / f'{name}.py').write_text(f"""
pretrained = 'work_dirs/swin_un_classifier/epoch_3.pth'
model = dict(backbone=dict(
    norm_cfg={norm}, stage_cfgs=[dict(norm_cfg=dict(type='UN'), depth=2), dict(block_cfgs=dict(norm_cfg={norm}))],
    init_cfg=dict(type='Pretrained', checkpoint=pretrained, prefix='backbone.')))
train_cfg = dict(by_epoch=False, max_iters=100)
""")
    return Config.fromfile(tmp_path / f'{name}.py')


@pytest.mark.parametrize(('norm_cfg', 'complete'), [
    (dict(type='LN'), dict(type='LN')),
    (dict(type='UN', window=2), dict(type='UN', window=2, alpha=0.5, warmup_iters=7)),
    (dict(type='MABN'), dict(type='MABN', warmup_iters=7))])
def test_every_norm_gets_the_arguments_that_go_with_the_recipe(norm_cfg, complete, tmp_path):
    cfg = config(tmp_path)
    set_norm(cfg, norm_cfg)
    backbone = cfg.model.backbone
    assert backbone.norm_cfg == complete
    assert backbone.stage_cfgs[0] == dict(norm_cfg=complete, depth=2)
    assert backbone.stage_cfgs[1].block_cfgs.norm_cfg == complete


@pytest.mark.parametrize('scope', ['mmdet', None])
def test_a_stock_backbone_over_maps_gets_the_form_for_maps(scope, tmp_path):
    path = tmp_path / 'a.py'
    path.write_text(f"""
default_scope = {scope!r}
model = dict(type='ImageClassifier', backbone=dict(type='mmpretrain.ConvNeXt', norm_cfg=dict(type='UN', window=2)))
""")
    assert load_config(str(path)).model.backbone.norm_cfg == dict(type='UN2d', window=2)
    for norm, norm_cfg in (('LN', dict(type='LN')), ('UN+', dict(type='UN', window=2, centered=True, eta=0.))):
        assert load_config(str(path), norm=norm).model.backbone == dict(
            type='ReplacedNorms', of='mmpretrain.ConvNeXt', norm_cfg=norm_cfg)


def test_listed_norms_are_replaced():
    arch = dict(embed_dims=8, num_layers=1, num_heads=2, feedforward_channels=8)
    model = MODELS.build(dict(type='ReplacedNorms', of='mmpretrain.VisionTransformer', arch=arch, img_size=32,
                              patch_size=16, norm_cfg=dict(type='UN'), converted=['ln1']))
    assert (type(model.ln1).__name__, type(model.layers[0].ln1).__name__) == ('UN', 'LayerNorm')


@pytest.mark.parametrize(('name', 'norm', 'folder', 'weights'), [
    ('swin_un_detector', 'PN*', 'swin_pn_star_detector', 'swin_pn_star_classifier'),
    ('swin_un_detector', 'UN', 'swin_un_detector', 'swin_un_classifier'),
    ('swin_un_detector', 'UN+', 'swin_un_plus_detector', 'swin_un_plus_classifier'),
    ('swin_un_detector', 'wide=UN,window=8', 'swin_wide_detector', 'swin_wide_classifier'),
    ('mine', 'BN', 'mine_bn', 'swin_bn_classifier')])
def test_work_directory_and_weights_go_with_the_norm(name, norm, folder, weights, tmp_path):
    cfg = config(tmp_path, name=name)
    apply_norm(cfg, norm)
    assert cfg.work_dir == f'work_dirs/{folder}'
    assert cfg.model.backbone.init_cfg.checkpoint == cfg.pretrained == f'work_dirs/{weights}/epoch_3.pth'


def test_a_named_form_is_kept(tmp_path):
    config(tmp_path, "dict(type='UN', centered=True)")
    path = str(tmp_path / 'swin_un_detector.py')
    assert load_config(path).model.backbone.norm_cfg.centered is True
    for norm, options, centered in [('a=UN,centered=False', {}, False), ('a=UN,centered=frozen', {}, 'frozen'),
                                    ('UN+', {}, True),
                                    ('UN+', {'model.backbone.norm_cfg.centered': 'frozen'}, 'frozen')]:
        assert load_config(path, options, norm).model.backbone.norm_cfg.centered == centered


def test_weights_from_elsewhere_stay_and_folders_differ(tmp_path):
    cfg = config(tmp_path)
    cfg.model.backbone.init_cfg.checkpoint = 'https://example.org/swin_un_x/a.pth'
    apply_norm(cfg, 'BN')
    assert cfg.model.backbone.init_cfg.checkpoint == 'https://example.org/swin_un_x/a.pth'
    assert len({slug(name) for name in NORMS}) == len(NORMS)
