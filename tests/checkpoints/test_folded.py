"""save_folded and load_folded of models of torch alone: in wrappers, with changed models and damaged files."""
import copy

import pytest
import torch
from mmengine.config import Config
from mmengine.model import ExponentialMovingAverage
from torch import nn

from mmunorm import fuse_norms, load_folded, replace_norms, save_folded
from mmunorm.config.models import build_model, match_folded

from ..fusion import models

pytestmark = pytest.mark.usefixtures('in_a_folder')


make = models.tiny_vit


@pytest.fixture(scope='module')
def folded():
    return models.folded_tiny_vit()


def with_a_compiled_block(model):
    model.blocks[0] = torch.compile(model.blocks[0], backend='eager')
    return model


@pytest.mark.parametrize('wrap', [lambda model: torch.compile(model, backend='eager'), nn.DataParallel,
                                  torch.optim.swa_utils.AveragedModel, ExponentialMovingAverage,
                                  with_a_compiled_block],
                         ids=['compiled', 'data_parallel', 'averaged', 'averaged_by_mmengine', 'compiled_block'])
def test_wrapped_models(folded, wrap):
    """Before or after folding, at saving or at loading, the file is that of the model inside."""
    x = torch.randn(2, 3, 16, 16)
    save_folded(folded, 'plain.pth')
    save_folded(wrap(copy.deepcopy(folded)), 'wrapped.pth')
    plain, wrapped = (torch.load(name, weights_only=True) for name in ('plain.pth', 'wrapped.pth'))
    assert wrapped['meta'] == plain['meta']
    assert wrapped['state_dict'].keys() == plain['state_dict'].keys()
    torch.testing.assert_close(*(models.tensors(file['state_dict']) for file in (wrapped, plain)), rtol=0, atol=0)
    assert torch.equal(load_folded('wrapped.pth', make())(x), folded(x))
    outer = wrap(make())
    assert load_folded('plain.pth', outer) is outer
    torch.testing.assert_close(outer(x), folded(x))
    early = models.randomize(replace_norms(make(), dict(type='UN')), gamma='none').eval()
    early = wrap(early).eval()
    fuse_norms(early, strict=True, example=x)
    save_folded(early, 'early.pth')
    torch.testing.assert_close(load_folded('early.pth', make())(x), early(x))


@pytest.mark.parametrize('change, message', [
    (lambda model: setattr(model, 'head', nn.Linear(16, 4)), 'size mismatch for head'),
    (lambda model: delattr(model, 'norm'), 'has no norm norm'),
    (lambda model: setattr(model.blocks[0].attn, 'num_heads', 1), 'blocks.0.attn.num_heads is 2 in the file and 1'),
    (lambda model: model.to('meta'), 'it is on the meta device'),
    (lambda model: fuse_norms(model, example=torch.randn(1, 3, 16, 16)), 'folded already')])
def test_a_model_that_the_file_does_not_fit_stays_as_it_is(folded, change, message):
    save_folded(folded, 'folded.pth')
    model = make()
    change(model)
    before = copy.deepcopy(model)
    with pytest.raises(ValueError, match=message):
        load_folded('folded.pth', model)
    assert [type(part) for part in model.modules()] == [type(part) for part in before.modules()]
    assert all(value.is_meta or torch.equal(value, before.state_dict()[name])
               for name, value in model.state_dict().items())


def test_a_file_that_is_no_folded_checkpoint(folded):
    with open('text.pth', 'w') as file:
        file.write('hi')
    torch.save(folded.state_dict(), 'plain.pth')
    for path, message in (('text.pth', 'text.pth: not a checkpoint'), ('plain.pth', 'plain.pth: not a folded check')):
        with pytest.raises(ValueError, match=message):
            load_folded(path, make())


def test_a_loaded_model_can_be_saved_again(folded):
    save_folded(folded, 'first.pth')
    save_folded(load_folded('first.pth', make()), 'second.pth')
    again = load_folded('second.pth', make()).state_dict()
    assert all(torch.equal(value, again[name]) for name, value in folded.state_dict().items())


def test_a_config_that_lists_its_converted_norms_builds_the_folded_model():
    cfg = Config(dict(default_scope='mmpretrain', model=dict(
        models.classifier_cfg(models.vit_backbone(models.LN), 16, 'VisionTransformerClsHead', neck=False),
        type='ReplacedNorms', of='ImageClassifier', norm_cfg=models.UN, converted=['backbone.ln1'])))
    model = models.randomize(models.build(cfg.model), gamma='none')
    assert len(fuse_norms(model).folded) == 1
    save_folded(model, 'folded.pth', cfg)
    x = torch.randn(1, 3, 32, 32)
    assert torch.equal(load_folded('folded.pth', models.build(cfg.model))(x), model(x))
    match_folded(cfg, 'folded.pth')
    assert cfg.model.type == 'FoldedModel' and build_model(cfg).state_dict().keys() == model.state_dict().keys()
