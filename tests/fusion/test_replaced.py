"""A layer that took up a norm is replaced: a warning, before features without the norm are used."""
import copy
import warnings

import pytest
import torch
from torch import nn

from mmunorm import load_folded, replace_norms, save_folded
from mmunorm.fusion import replaced
from mmunorm.fusion.replaced import noted_norms

from . import models

make = models.tiny_vit


@pytest.fixture(scope='module')
def folded():
    return models.folded_tiny_vit()


def loaded(model, folder):
    save_folded(model, folder / 'folded.pth')
    return load_folded(folder / 'folded.pth', make())


def in_wrapper(model):
    model.head = nn.Sequential(nn.Dropout(), nn.Linear(16, 3))


@pytest.mark.parametrize('replace, kind', [
    (lambda model: model.reset_classifier(0), 'Identity'), (lambda model: model.reset_classifier(7), 'Linear'),
    (lambda model: setattr(model, 'head', nn.Linear(16, 3)), 'Linear'), (in_wrapper, 'Sequential')],
    ids=['reset_to_0', 'reset_to_7', 'other_layer', 'sequential'])
@pytest.mark.parametrize('get', [lambda model, _: copy.deepcopy(model), loaded], ids=['copy', 'loaded'])
def test_another_layer_is_a_warning(get, replace, kind, folded, tmp_path):
    model = get(folded, tmp_path)
    assert noted_norms(model) == noted_norms(folded) == {
        'blocks.0.attn.qkv': ['blocks.0.norm1'], 'blocks.0.mlp.fc1': ['blocks.0.norm2'], 'head': ['norm']}
    with pytest.warns(UserWarning, match=f'^head of VisionTransformer holds the folded norm norm: the {kind} in its '
                      r'place gets features that are not normalized\. Replace the layer before fuse_norms\(\)$'):
        replace(model)


def test_a_process_that_unpickles_a_model_warns(folded, tmp_path):
    torch.save(folded, tmp_path / 'model.pth')
    replaced._hooks.pop().remove()  # as in a new process
    model = torch.load(tmp_path / 'model.pth', weights_only=False)
    with pytest.warns(UserWarning, match='^head of VisionTransformer holds the folded norm norm'):
        model.reset_classifier(0)


class Wrapper(nn.Module):

    def __init__(self, layer):
        super().__init__()
        self.layer, self.other = layer, nn.Linear(2, 2)


def as_convolution(layer):
    new = nn.Conv1d(16, 3, 1)
    new.weight.data.copy_(layer.weight[:, :, None])
    return nn.Sequential(nn.Identity(), new)


@pytest.mark.parametrize('new', [Wrapper, copy.deepcopy, lambda layer: copy.deepcopy(layer).half(), as_convolution,
                                 lambda layer: nn.Bilinear(2, 2, 2)],
                         ids=['wrapper', 'copy', 'half', 'convolution', 'other_class'])
def test_the_same_weights_or_another_kind_of_layer_is_none(new, folded):
    model = copy.deepcopy(folded)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        model.head = new(model.head)
        model.norm_pre = nn.Identity()
        replace_norms(make(), dict(type='UN')).head = nn.Identity()
