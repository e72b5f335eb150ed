import pytest
from torch import nn

from mmunorm import load_folded, save_folded


def test_arguments_in_another_order(tmp_path):
    with pytest.raises(TypeError, match=r'^path: must be that of a file, got Linear; load_folded\(path, model\)$'):
        load_folded(nn.Linear(1, 1), tmp_path / 'a.pth')
    with pytest.raises(TypeError, match='^model: must be an nn.Module, got str'):
        load_folded(tmp_path / 'a.pth', 'model')
    with pytest.raises(TypeError, match='^model: must be an nn.Module, got PosixPath'):
        save_folded(tmp_path / 'a.pth', nn.Linear(1, 1))
