"""The replacement of `mmcv._ext` if mmcv has no compiled operators (see `mmunorm.ops.install`).

The functions have the names, arguments and in-place outputs of the C++ ones in `mmcv/ops/csrc/pytorch`, and call
torchvision's operators. torchvision is imported on first use, because its import takes as long as torch's, and
classifiers do not need it.
"""
import torch

_INSTALL_HINT = (
    'To get it, build mmcv where this torch is installed, with a C++ compiler (for GPU tensors also the '
    'CUDA toolkit). Unpack the source archive of your mmcv distribution (`pip download --no-deps '
    '--no-binary :all: onedl-mmcv`) and run `pip install --no-build-isolation .` in it. For torch 2.14 and '
    'later, write -std=c++20 where its setup.py says c++17. mmunorm then uses the compiled operators.')


def _operators():
    import torchvision  # noqa: F401, registers torch.ops.torchvision
    return torch.ops.torchvision


def _at_least_float32(a, b):
    """The common dtype to compute in: box coordinates lose whole pixels in half precision."""
    return torch.promote_types(torch.float32, torch.promote_types(a.dtype, b.dtype))


def nms(boxes, scores, iou_threshold, offset):
    """Greedy non-maximum suppression: int64 indices of the kept boxes, highest score first; equal scores keep their
    order.

    A box of (N, 4) x1 y1 x2 y2 is dropped if its IoU with a kept one is strictly above the threshold. `offset` is added
    to every width and height: 1 where coordinates are pixel indices.
    """
    dtype = _at_least_float32(boxes, scores)
    if offset:
        # Shifting x2 and y2 by the offset yields the widened boxes and intersections; in float64, exactly.
        dtype = torch.float64
        boxes = boxes.to(dtype)
        boxes = torch.cat([boxes[:, :2], boxes[:, 2:] + offset], dim=1)
    # mmcv compares in the precision of the boxes: an IoU of 3/5 is not above a threshold of 0.6.
    threshold = torch.tensor(iou_threshold, dtype=dtype, device='cpu').item()
    return _operators().nms(boxes.to(dtype), scores.to(dtype), threshold)


def roi_align_forward(input, rois, output, argmax_y, argmax_x, aligned_height, aligned_width,
                      spatial_scale, sampling_ratio, pool_mode, aligned):
    """RoIAlign with average pooling of `input` (N, C, H, W), written into `output` (K, C, height, width).

    `rois` are (K, 5), image index and x1 y1 x2 y2, of any dtype.

    Raises:
        NotImplementedError: `pool_mode` is 0, for maximum, and not 1.
        ValueError: a box is outside of the input; on a GPU, the check would need a synchronization in each call.
    """
    if pool_mode != 1:
        _refuse("roi_align with pool_mode='max'")
    if not output.numel():
        return
    _check_rois(input, rois, aligned)
    dtype = _at_least_float32(input, rois)
    output.copy_(_operators().roi_align(
        input.to(dtype), rois.to(dtype), spatial_scale, aligned_height, aligned_width, sampling_ratio, aligned))


def roi_align_backward(grad_output, rois, argmax_y, argmax_x, grad_input, aligned_height,
                       aligned_width, spatial_scale, sampling_ratio, pool_mode, aligned):
    """Adds the gradient of :func:`roi_align_forward` to `grad_input`; the other arguments are those of the forward."""
    dtype = _at_least_float32(grad_output, rois)
    grad_input.add_(_operators()._roi_align_backward(
        grad_output.to(dtype), rois.to(dtype), spatial_scale, aligned_height, aligned_width,
        *grad_input.shape, sampling_ratio, aligned))


def get_compiler_version():
    """The line 'MMCV Compiler' of `collect_env`."""
    return 'none (mmunorm.ops uses torchvision)'


def get_compiling_cuda_version():
    """The line 'MMCV CUDA Compiler' of `collect_env`."""
    return 'not available'


def __getattr__(name):
    # On import, mmcv only checks whether an operator exists, so operators that are never called may be missing.
    # Private names of a module are missing.
    if name.startswith('_'):
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')

    return lambda *args, **kwargs: _refuse(name)


def _refuse(name):
    raise NotImplementedError(
        f"{name} is one of mmcv's compiled operators, and this mmcv was installed without them; mmunorm replaces only "
        f"nms and roi_align (pool_mode='avg'). {_INSTALL_HINT}")


def _check_rois(input, rois, aligned):
    """Rejects boxes that would make torchvision read outside of `input` and crash the process."""
    if not input.numel():
        raise ValueError(f'roi_align: input of shape {tuple(input.shape)} has no pixels to pool, but '
                         f'rois holds {rois.size(0)} boxes')
    if rois.device.type != 'cpu':
        return
    index, corners = rois[:, 0], rois[:, 1:]
    good = corners.isfinite().all(1) & (index >= 0) & (index < input.size(0))
    if aligned:
        good &= (corners[:, 2:] >= corners[:, :2]).all(1)
    if not good.all():
        bad = rois[~good][0].tolist()
        raise ValueError(
            f'roi_align: rois holds (image index, x1, y1, x2, y2) = {bad}; the index must lie in '
            f'[0, {input.size(0)}), the coordinates must be finite'
            + (', and x1 <= x2, y1 <= y2' if aligned else ''))
