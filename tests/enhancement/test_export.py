"""An exported file has the enhancer in it."""
import pytest
import torch

pytest.importorskip('onnxscript')
pytest.importorskip('onnxruntime')

from mmunorm import fuse_norms
from mmunorm.deploy import FORMATS, export_file, prepare_export
from mmunorm.enhancement import IAT, EnhancingPreprocessor

from ..deploy.conftest import meta_of, normalizing
from ..fusion import models


@pytest.mark.slow
def test_an_enhancer_is_in_the_file(tmp_path):
    torch.manual_seed(0)
    model = normalizing(models.deit_classifier())
    model.data_preprocessor = EnhancingPreprocessor(model.data_preprocessor, IAT(), frozen=False, takes_rgb=False)
    fuse_norms(model.eval(), strict=True)
    made = export_file(prepare_export(model, meta_of(model, (32, 32))), FORMATS['onnx'], tmp_path / 'm.onnx')
    assert made.norms == 0 and made.difference.largest['scores'] < 2e-5
