import math
import re
import subprocess
import sys
from pathlib import Path

import mmunorm.ops  # makes the next import possible

# isort: split
import mmcv._ext as mmcv_ext
import mmcv.ops
import pytest
import torch
import torchvision
from hypothesis import given, settings
from hypothesis import strategies as st
from mmcv.utils import collect_env
from mmcv.utils.ext_loader import check_ops_exist
from mmengine.utils.dl_utils import mmcv_full_available

from .. import processes

pytestmark = pytest.mark.skipif(Path(mmcv_ext.__file__).name != 'mmcv_ext.py', reason='mmcv has operators of its own')
OPS = Path(mmunorm.ops.__file__)
USED = {name for file in Path(mmcv.ops.__file__).parent.glob('*.py')
         for name in re.findall(r'\bext_module\.(\w+)', file.read_text(encoding='utf-8'))}
IMPLEMENTED = {'nms', 'roi_align_forward', 'roi_align_backward', 'get_compiler_version', 'get_compiling_cuda_version'}


# ---- nms -------------------------------------------------------------------------------------------
def plain_nms(boxes, scores, threshold, offset=0):
    """Greedy suppression by its definition, in float32, as mmcv's C++ computes it."""
    boxes = boxes.double() + torch.tensor([0, 0, offset, offset])
    overlap = torchvision.ops.box_iou(boxes, boxes).float()  # NaN of two boxes without area
    kept = []
    for i in sorted(range(len(boxes)), key=lambda i: -scores[i].item()):
        if not (overlap[i, kept] > torch.tensor(threshold)).any():
            kept.append(i)
    return kept


pixel_boxes = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(0, 6), st.integers(0, 6),
              st.integers(0, 3)), max_size=10)


@settings(derandomize=True, deadline=None, max_examples=50)
@given(pixel_boxes, st.sampled_from([0., 1 / 3, 0.4, 0.5, 0.6, 0.7, 0.9]), st.sampled_from([0, 1]))
def test_nms_on_pixel_boxes_with_ties(drawn, threshold, offset):
    drawn = torch.tensor(drawn, dtype=torch.float32).reshape(-1, 5)
    boxes = torch.cat([drawn[:, :2], drawn[:, :2] + drawn[:, 2:4]], dim=1)
    scores = drawn[:, 4]
    kept = mmcv_ext.nms(boxes, scores, iou_threshold=threshold, offset=offset)
    assert kept.dtype == torch.int64
    assert kept.tolist() == plain_nms(boxes, scores, threshold, offset)


def test_nms_threshold_is_strict_in_the_precision_of_the_boxes():
    boxes = torch.tensor([[0., 0., 4., 1.], [1., 0., 5., 1.]])  # IoU 3/5, and float32(3/5) > 0.6
    scores = torch.tensor([0.9, 0.8])
    for dtype in (torch.float32, torch.float64, torch.float16):
        assert mmcv_ext.nms(boxes.to(dtype), scores, 0.6, 0).tolist() == [0, 1]
        assert mmcv_ext.nms(boxes.to(dtype), scores, 0.599, 0).tolist() == [0]
    scores = torch.tensor([0.5, 0.5 + 1e-12], dtype=torch.float64)  # and these are ordered in theirs
    assert mmcv_ext.nms(boxes, scores, 0.5, 0).tolist() == [1]


# ---- roi_align -------------------------------------------------------------------------------------
def random_rois():
    """Inside and over the border, image 1 first."""
    corners = torch.rand(8, 2, dtype=torch.float64) * 9 - 2
    rois = torch.cat([corners, corners + torch.rand(8, 2, dtype=torch.float64) * 6], dim=1)
    return torch.cat([(torch.arange(8)[:, None] + 1) % 2, rois], dim=1)


@pytest.mark.parametrize('aligned', [True, False])
@pytest.mark.parametrize('dtype, rois_dtype, tolerance', [
    (torch.float64, torch.float64, 1e-10), (torch.float32, torch.float64, 1e-5), (torch.float16, torch.float16, 2e-3),
    (torch.bfloat16, torch.float32, 2e-2)])
def test_roi_align(aligned, dtype, rois_dtype, tolerance):
    """The output and gradient of torchvision's, whose numbers are tested there, in the dtype of the input."""
    input, rois = torch.randn(2, 3, 6, 8).to(dtype).requires_grad_(), random_rois().to(rois_dtype)
    output = mmcv.ops.roi_align(input, rois, (3, 2), 0.75, 2, 'avg', aligned)
    wide = input.detach().double().requires_grad_()
    expected = torchvision.ops.roi_align(wide, rois.double(), (3, 2), 0.75, 2, aligned)
    weight = torch.randn_like(expected).to(dtype)
    (output * weight).sum().backward()
    (expected * weight).sum().backward()
    assert output.dtype == input.grad.dtype == dtype and wide.grad.abs().sum() > 1
    torch.testing.assert_close(output.double(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(input.grad.double(), wide.grad, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize('aligned', [True, False])
@pytest.mark.parametrize('images', [0, 2])
def test_roi_align_of_no_rois(aligned, images):
    input = torch.randn(images, 3, 6, 8, requires_grad=True)
    output = mmcv.ops.roi_align(input, torch.zeros(0, 5), (7, 7), 1., 0, 'avg', aligned)
    assert output.shape == (0, 3, 7, 7)
    output.sum().backward()
    assert input.grad.shape == input.shape and not input.grad.any()


@pytest.mark.parametrize('roi', [
    [2., 0., 0., 3., 3.], [-1., 0., 0., 3., 3.], [math.nan, 0., 0., 3., 3.],
    [0., 0., math.nan, 3., 3.], [0., 0., 0., math.inf, 3.]])
@pytest.mark.parametrize('aligned', [True, False])
def test_roi_align_refuses_what_would_crash(roi, aligned):
    rois = torch.tensor([[0., 0., 0., 3., 3.], roi])
    with pytest.raises(ValueError, match=re.escape(str(roi))):
        mmcv.ops.roi_align(torch.zeros(2, 3, 6, 8), rois, (2, 2), 1., 2, 'avg', aligned)
    with pytest.raises(ValueError, match=r'input of shape \(2, 3, 6, 0\) has no pixels'):
        mmcv.ops.roi_align(torch.zeros(2, 3, 6, 0), rois, (2, 2), 1., 2, 'avg', aligned)


def test_roi_align_of_a_negative_size():
    rois = torch.tensor([[0., 3., 3., 1., 5.]])
    with pytest.raises(ValueError, match='x1 <= x2'):
        mmcv.ops.roi_align(torch.zeros(1, 3, 6, 8), rois, (2, 2), 1., 0, 'avg', True)
    output = mmcv.ops.roi_align(torch.ones(1, 3, 6, 8), rois, (2, 2), 1., 0, 'avg', False)
    torch.testing.assert_close(output, torch.ones(1, 3, 2, 2))  # a side of 1 by the old convention


def test_every_other_operator_raises_when_called():
    assert len(USED) > 100 and IMPLEMENTED < USED and mmcv_full_available() and check_ops_exist()
    for name in USED - IMPLEMENTED:
        with pytest.raises(NotImplementedError, match=rf'^{name} is .*build mmcv.*std=c\+\+20'):
            getattr(mmcv_ext, name)(torch.zeros(1), key=1)
    with pytest.raises(NotImplementedError, match="pool_mode='max'"):
        mmcv.ops.roi_align(torch.ones(1, 3, 6, 8), torch.zeros(1, 5), (2, 2), 1., 0, 'max', True)
    assert not hasattr(mmcv_ext, '__path__')
    assert collect_env()['MMCV Compiler'] == mmcv_ext.get_compiler_version()


# ---- install ---------------------------------------------------------------------------------------
@pytest.mark.parametrize('compiled', [True, False])
def test_install_steps_aside_for_a_compiled_mmcv(tmp_path, compiled):
    package = tmp_path / 'mmcv'
    package.mkdir()
    for path in (package / '__init__.py', tmp_path / 'torch.py', *[package / '_ext.py'] * compiled):
        path.touch()
    code = f'''
import sys
sys.path.append({str(OPS.parents[1])!r})  # without the package around it
import mmcv, ops
from importlib.util import find_spec
assert (find_spec('mmcv._ext') is not None) == {compiled}
ops.install(), ops.install()
found = find_spec('mmcv._ext')
assert 'mmcv._ext' not in sys.modules and 'torch' not in sys.modules
import mmcv._ext
from mmcv import _ext
assert _ext is mmcv._ext is sys.modules['mmcv._ext'] and _ext.__spec__.origin == found.origin
assert find_spec('mmcv._ext') is _ext.__spec__
assert find_spec('mmcv._other') is None
print(_ext.__file__)'''
    out = subprocess.run([sys.executable, '-c', code], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    expected = package / '_ext.py' if compiled else OPS.with_name('mmcv_ext.py')
    assert Path(out.strip()).samefile(expected)


def test_install_too_late_warns(monkeypatch):
    finder = mmunorm.ops._StandInFinder
    monkeypatch.setattr(sys, 'meta_path', [f for f in sys.meta_path if f is not finder])
    monkeypatch.delitem(sys.modules, 'mmcv.ops')
    monkeypatch.setitem(sys.modules, 'mmdet.models.dense_heads.base_dense_head', sys)
    with pytest.warns(UserWarning, match='import mmunorm first'):
        mmunorm.ops.install()
    assert sys.meta_path[-1] is finder


def operators_and_modules(rank):
    return mmcv.ops.nms.__module__, {'torchmetrics', 'sacrebleu', 'sentencepiece'} & set(sys.modules)


def test_import_in_a_fresh_interpreter():
    """Each process is forked from one that has imported mmunorm, and then mmdet."""
    assert processes.run(operators_and_modules, processes=1) == [('mmcv.ops.nms', set())]
