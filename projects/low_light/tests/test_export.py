import pytest

from mmunorm import fuse_norms
from mmunorm.deploy.export import prepare_export
from projects.low_light.low_light import IAT, EnhancingPreprocessor
from tests.deploy.conftest import meta_of, normalizing
from tests.deploy.test_formats import assert_runs, export, one_stage


@pytest.mark.slow
def test_an_enhancer_is_in_the_file(tmp_path):
    model = normalizing(one_stage())
    model.data_preprocessor = EnhancingPreprocessor(model.data_preprocessor, IAT(), frozen=False, takes_rgb=False)
    fuse_norms(model.eval(), strict=True)
    made = export(prepare_export(model, meta_of(model, (32, 32))), 'onnx', tmp_path)
    assert made.norms == 0 and made.difference.largest['scores'] < 2e-5
    assert_runs(model, made.path, 3, (32, 32), atol=2e-5)
