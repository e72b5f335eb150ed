"""INT8: which form each norm has in front of the quantizer, and what the quantizers of the runtimes make of it."""
from .forms import NormForm, apply_forms, choose_forms

__all__ = ['NormForm', 'apply_forms', 'choose_forms']
