"""Files for Arm's Ethos-U, compiled by Vela."""
import pytest

from mmunorm.deploy import FORMATS, Runner, export_file, prepare_export
from mmunorm.deploy.pictures import Samples
from mmunorm.utils import PreflightError

from .conftest import blurred, meta_of

for package in ('ethosu', 'litert_torch', 'ai_edge_quantizer', 'onnx'):
    pytest.importorskip(package)

from mmunorm.deploy.formats.ethos_u import compile_file

ETHOS_U = FORMATS['ethos-u']


def test_a_swin_without_norms(swin, tmp_path):
    exportable = prepare_export(swin, meta_of(swin))
    samples = Samples(list(blurred()), exportable.meta, 1)
    made = export_file(exportable, ETHOS_U, tmp_path / 'm.vela.tflite', int8=ETHOS_U.int8_kind(None), samples=samples)
    assert sorted(path.name for path in tmp_path.iterdir()) == ['m.vela.csv', 'm.vela.layers.csv', 'm.vela.tflite']
    assert 0 < made.difference.largest['scores'] < 0.15  # of the integers that Vela read
    assert made.lines[0].startswith("Vela's ESTIMATE for Ethos_U") and ' ms, ' in made.lines[0]
    with pytest.raises(PreflightError, match='runs on an Ethos-U alone; .* --format litert --int8 full'):
        Runner(made.path)
    with pytest.raises(PreflightError, match='--half does not go with --format ethos-u'):
        export_file(exportable, ETHOS_U, made.path, half=True, int8='full', samples=samples)
    # The smaller chips take a Swin-T, not this one of 8 channels and an odd size. The files of before stay.
    with pytest.raises(PreflightError, match='cannot compile this model for ethos-u65-256 .*Conv2D'):
        export_file(exportable, ETHOS_U, made.path, int8='full', samples=samples, accelerator='ethos-u65-256')
    assert len(list(tmp_path.iterdir())) == 3


def test_what_vela_cannot_read(tmp_path):
    (tmp_path / 'm.tflite').write_bytes(b'not a model')
    with pytest.raises(PreflightError, match="Arm's Vela cannot compile this model for ethos-u85-512"):
        compile_file(tmp_path / 'm.tflite', tmp_path / 'm.vela.tflite', 'ethos-u85-512')
    assert [path.name for path in tmp_path.iterdir()] == ['m.tflite']
