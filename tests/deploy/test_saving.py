"""What an export leaves on the disk; no runtime is needed."""
from mmunorm.deploy.saving import file_size


def test_the_size_is_that_of_the_format_s_own_files(tmp_path):
    for name, size in (('m.onnx', 10), ('m.xml', 20), ('m.bin', 300)):
        (tmp_path / name).write_bytes(bytes(size))
    assert file_size(tmp_path / 'm.onnx') == 10 and file_size(tmp_path / 'm.xml') == 320
