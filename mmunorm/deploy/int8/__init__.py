"""INT8: which form each norm has in front of the quantizer, and what the quantizers of the runtimes make of it."""
from .forms import NormForm, apply_forms, choose_forms, forms_table
from .samples import Samples, samples_of

__all__ = ['NormForm', 'Samples', 'apply_forms', 'choose_forms', 'forms_table', 'samples_of']
