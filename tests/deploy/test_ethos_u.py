"""Files for Arm's Ethos-U, compiled by Vela."""
import pytest

from mmunorm.deploy import FORMATS, Runner, export_file
from mmunorm.deploy.pictures import Samples
from mmunorm.utils import PreflightError

from .conftest import blurred

for package in ('ethosu', 'litert_torch', 'ai_edge_quantizer', 'onnx'):
    pytest.importorskip(package)

from mmunorm.deploy.formats.ethos_u import compile_file

ETHOS_U = FORMATS['ethos-u']


@pytest.mark.parametrize('accelerator', [None, 'ethos-u55-256'])
def test_a_swin_without_norms(exportable, tmp_path, accelerator):
    samples = Samples(list(blurred()), exportable.meta, 2)
    made = export_file(exportable, ETHOS_U, tmp_path / 'm.vela.tflite', int8=ETHOS_U.int8_kind(None), samples=samples,
                       accelerator=accelerator)
    assert sorted(path.name for path in tmp_path.iterdir()) == ['m.vela.csv', 'm.vela.layers.csv', 'm.vela.tflite']
    assert 0 < made.difference.largest['scores'] < 0.15  # of the integers that Vela read
    assert made.lines[0].startswith("Vela's ESTIMATE for Ethos_U") and ' ms, ' in made.lines[0]
    with pytest.raises(PreflightError, match='runs on an Ethos-U alone; .* --format litert --int8 full'):
        Runner(made.path)


def test_what_vela_cannot_read(tmp_path):
    (tmp_path / 'm.tflite').write_bytes(b'not a model')
    with pytest.raises(PreflightError, match="Arm's Vela cannot compile this model for ethos-u85-512"):
        compile_file(tmp_path / 'm.tflite', tmp_path / 'm.vela.tflite', 'ethos-u85-512')
    assert [path.name for path in tmp_path.iterdir()] == ['m.tflite']
