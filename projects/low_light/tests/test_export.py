import pytest
import torch

from mmunorm import compare, fuse_norms
from mmunorm import export as export_model
from mmunorm.deploy.openmmlab import prepare_export
from projects.low_light.low_light import IAT, EnhancingPreprocessor
from tests.deploy.conftest import meta_of, normalizing, small_swin, write
from tests.deploy.test_formats import assert_runs

from .test_iat import trained


def test_an_enhancer_alone_is_a_file(tmp_path):
    """An enhancer takes values from 0 to 1 only."""
    pytest.importorskip('onnxruntime')
    torch.manual_seed(0)
    model, images = trained(dtype=torch.float32), torch.rand(2, 3, 16, 24)
    fuse_norms(model, strict=True)
    assert export_model(model, images[:1], tmp_path / 'iat.onnx').norms == 0
    assert compare(tmp_path / 'iat.onnx', model, images[:1]).snr['output'] > 80


@pytest.mark.slow
def test_an_enhancer_is_in_the_file(tmp_path):
    model = normalizing(small_swin(1))
    model.data_preprocessor = EnhancingPreprocessor(model.data_preprocessor, IAT(), frozen=False, takes_rgb=False)
    fuse_norms(model.eval(), strict=True)
    exported = write(prepare_export(model, meta_of(model, (32, 32))), 'onnx', tmp_path)
    assert exported.norms == 0 and exported.difference.largest['scores'] < 2e-5
    assert_runs(model, exported.path, 3, (32, 32), atol=2e-5)
