"""save_folded and load_folded of models of torch alone: in wrappers, onto links and devices, with wrong arguments."""
import copy
import os

import pytest
import timm
import torch
from torch import nn

from mmunorm import fuse_norms, load_folded, replace_norms, save_folded

from ..fusion import models

pytestmark = pytest.mark.usefixtures('in_a_folder')


def make():
    return timm.models.VisionTransformer(img_size=16, patch_size=8, embed_dim=16, depth=1, num_heads=2,
                                         num_classes=3).eval()


@pytest.fixture(scope='module')
def folded():
    model = models.randomize(replace_norms(make(), dict(type='UN')), gamma='none').eval()
    fuse_norms(model, strict=True, example=torch.randn(1, 3, 16, 16))
    return model


def with_a_compiled_block(model):
    model.blocks[0] = torch.compile(model.blocks[0], backend='eager')
    return model


@pytest.mark.parametrize('wrap', [lambda model: torch.compile(model, backend='eager'), nn.DataParallel,
                                  torch.optim.swa_utils.AveragedModel, with_a_compiled_block],
                         ids=['compiled', 'data_parallel', 'averaged', 'compiled_block'])
def test_wrapped_models(folded, wrap):
    """Before or after folding, at saving or at loading, the file is that of the model inside."""
    x = torch.randn(2, 3, 16, 16)
    save_folded(folded, 'plain.pth')
    save_folded(wrap(copy.deepcopy(folded)), 'wrapped.pth')
    plain, wrapped = (torch.load(name, weights_only=True) for name in ('plain.pth', 'wrapped.pth'))
    assert wrapped['meta'] == plain['meta']
    torch.testing.assert_close(wrapped['state_dict'], plain['state_dict'], rtol=0, atol=0)
    assert torch.equal(load_folded('wrapped.pth', make())(x), folded(x))
    outer = wrap(make())
    assert load_folded('plain.pth', outer) is outer
    torch.testing.assert_close(outer(x), folded(x))
    early = models.randomize(replace_norms(make(), dict(type='UN')), gamma='none').eval()
    early = wrap(early).eval()
    fuse_norms(early, strict=True, example=x)
    save_folded(early, 'early.pth')
    torch.testing.assert_close(load_folded('early.pth', make())(x), early(x))


def test_links_are_kept_and_what_is_no_file_is_refused(folded):
    os.mkdir('elsewhere')
    os.mkfifo('pipe')
    os.symlink('elsewhere/real.pth', 'link.pth')
    os.symlink('/dev/null', 'null.pth')
    for _ in range(2):
        save_folded(folded, 'link.pth')
    assert os.path.islink('link.pth') and os.listdir('elsewhere') == ['real.pth']
    load_folded('elsewhere/real.pth', make())
    for path, error, message in (('pipe', OSError, 'device or a pipe; must be a regular file'),
                                 ('null.pth', OSError, "must be a regular file: '/dev/null'"),
                                 ('elsewhere', IsADirectoryError, 'is a folder; must be a file')):
        with pytest.raises(error, match=message):
            save_folded(folded, path)
    assert sorted(os.listdir()) == ['elsewhere', 'link.pth', 'null.pth', 'pipe']


def test_swapped_arguments(folded):
    with pytest.raises(TypeError, match=r'path: must be a path, got VisionTransformer; .* load_folded\(path, model\)'):
        load_folded(make(), 'folded.pth')
    with pytest.raises(TypeError, match='path: must be a path, got VisionTransformer'):
        load_folded(make())
    with pytest.raises(TypeError, match='^model: must be an nn.Module, got str$'):
        load_folded('folded.pth', 'folded.pth')
    with pytest.raises(TypeError, match=r'path: must be a path, got VisionTransformer; .* save_folded\(model, path\)'):
        save_folded(folded, folded)
