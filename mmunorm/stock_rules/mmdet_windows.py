"""mmdet's window attention with neutral padding; imported only when a model holds one."""
from mmdet.models.backbones.swin import ShiftWindowMSA

from .windows import FilledWindows


class FilledShiftWindowMSA(FilledWindows, ShiftWindowMSA):
    """What differs is in :class:`FilledWindows`."""
