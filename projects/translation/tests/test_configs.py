import pytest
from mmengine.config import Config

from mmunorm.cli.arguments import load_config
from mmunorm.config.models import build_model
from tests import tiny_runs

FOLDER = tiny_runs.ROOT / 'projects/translation/configs'
# The size at which the Transformers are built.
SMALL = dict(encoder_layers=3, decoder_layers=3, embed_dims=8, feedforward_channels=8, num_heads=2)


@pytest.mark.parametrize('name', tiny_runs.configs_in(FOLDER))
def test_every_norm_is_the_named_one_and_has_no_weight_decay(name):
    cfg = Config.fromfile(FOLDER / f'{name}.py')
    cfg.model.backbone.update(vocab_size=8, arch=SMALL)
    tiny_runs.check_norms_and_decay(cfg, 'LN' if '_ln' in name else 'UN')


def test_depth_and_scheme_of_the_translator_are_options():
    options = {'arch.encoder_layers': 4, 'arch.decoder_layers': 5, 'arch.embed_dims': 8, 'vocab_size': 8,
               'residual_cfg.type': 'BranchNorm', 'residual_cfg.warmup_iters': 9}
    backbone = build_model(load_config(f'{FOLDER}/wmt17_en_de_deep_ln.py',
                                       {f'model.backbone.{key}': value for key, value in options.items()})).backbone
    assert (len(backbone.encoder), len(backbone.decoder)) == (4, 5)


# The specification's settings of translation: architecture, layers a side, scheme, optimizer, rate, warm-up.
TRANSLATION = {
    'iwslt14_de_en_un': ('small', 'PreNorm', 'RAdam', 7e-4, 6000),
    'wmt14_en_fr_un': ('base', 'PreNorm', 'Adam', 7e-4, 4000),
    'wmt17_en_de_deep_ln': ((18, 18, 512, 2048, 8), 'DeepNorm', 'Adam', 1e-3, 4000),
}


@pytest.mark.parametrize('name', TRANSLATION)
def test_translation_recipe(name):
    cfg = Config.fromfile(FOLDER / f'{name}.py')
    backbone, optimizer = cfg.model.backbone, cfg.optim_wrapper.optimizer
    arch = backbone.arch if isinstance(backbone.arch, str) else tuple(backbone.arch.values())
    assert TRANSLATION[name] == (arch, backbone.get('residual_cfg', dict(type='PreNorm'))['type'], optimizer.type,
                                 optimizer.lr, cfg.param_scheduler[0].warmup)
    assert cfg.train_cfg.max_iters == 100_000 and cfg.train_dataloader.batch_sampler.max_tokens == 4096
    assert backbone.norm_cfg.get('outlier_filter', False) is False
