"""mmpretrain's window attention with neutral padding."""
from mmpretrain.models.utils import ShiftWindowMSA

from .windows import FilledWindows


class FilledShiftWindowMSA(FilledWindows, ShiftWindowMSA):
    """mmpretrain's class; what differs is in :class:`FilledWindows`."""
