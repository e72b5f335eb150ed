"""torch's attention without its flash kernel."""
from contextlib import contextmanager

import torch


@contextmanager
def plain_attention():
    """Within it, `scaled_dot_product_attention` takes matrix products, or a GPU's memory-efficient kernel."""
    flash = torch.backends.cuda.flash_sdp_enabled()
    torch.backends.cuda.enable_flash_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_flash_sdp(flash)
