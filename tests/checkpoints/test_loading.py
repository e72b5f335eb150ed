import importlib
import re

import pytest
import torch

from mmunorm.checkpoints.folded import load_folded, save_folded
from mmunorm.checkpoints.loading import check_checkpoint, load_weights, read_checkpoint
from mmunorm.fusion import fuse_norms
from mmunorm.norms import replace_norms
from mmunorm.utils import PreflightError

from ..fusion import models


@pytest.mark.parametrize('files, said', [
    (['.metadata', '__0_0.distcp'], 'format_utils dcp_to_torch .*epoch_1.pth FILE'),
    (['rank0.pth', 'rank1.pth'], "part for each process.*state_dict_cfg='full'"),
    (['mp_rank_00_model_states.pt'], 'part for each process'),
    (['epoch_3.pth', 'rank.txt'], r'such as \S+/epoch_1.pth/epoch_3.pth')])
def test_a_folder_is_told_apart(files, said, tmp_path):
    folder = tmp_path / 'epoch_1.pth'
    folder.mkdir()
    for name in files:
        torch.save({}, folder / name) if name == 'epoch_3.pth' else (folder / name).touch()
    with pytest.raises(PreflightError) as caught:
        check_checkpoint(str(folder))
    assert re.fullmatch(rf'{folder} is a folder.*{said}.*\.', str(caught.value))
    check_checkpoint(str(folder), folder=True)


def test_a_folder_of_torch_becomes_a_file_as_the_error_says(tmp_path):
    format_utils = pytest.importorskip('torch.distributed.checkpoint.format_utils', exc_type=ImportError)
    folder, file = tmp_path / 'epoch_1', tmp_path / 'epoch_1.pth'
    torch.distributed.checkpoint.save(dict(state_dict=dict(weight=torch.arange(3.0))), checkpoint_id=folder)
    with pytest.raises(PreflightError) as caught:
        read_checkpoint(str(folder))
    command = re.search(r'`python -m (\S+) dcp_to_torch (\S+) FILE`', str(caught.value))
    assert command[2] == str(folder)
    assert importlib.import_module(command[1]) is format_utils
    format_utils.dcp_to_torch_save(folder, file)
    assert read_checkpoint(str(file))['state_dict']['weight'].tolist() == [0, 1, 2]


def test_the_tables_that_swin_v2_drops_from_every_file_are_not_missed(tmp_path):
    def make():
        backbone = dict(type='SwinTransformerV2', img_size=32, window_size=4, out_indices=(1, ),
                        arch=dict(embed_dims=8, depths=[1, 1], num_heads=[1, 2], extra_norm_every_n_blocks=0))
        return replace_norms(models.classifier(backbone, 16), dict(type='UN'))

    model, other, x = make().eval(), make().eval(), torch.randn(2, 3, 32, 32)
    torch.save(dict(state_dict=model.state_dict()), tmp_path / 'a.pth')
    load_weights(other, str(tmp_path / 'a.pth'))
    assert torch.equal(model(x), other(x))
    fuse_norms(model)
    save_folded(model, tmp_path / 'folded.pth')
    torch.testing.assert_close(load_folded(tmp_path / 'folded.pth', make())(x), model(x))
