"""Initialization and parametrization (Su, kexue 8620) of weights and activations that keep the second moment."""
from ..registry import explain_missing, lacks
from .moments import ScaledActivation, activation_gain, keep_second_moment_, sample_
from .ntk import ntk_parametrize, remove_biases, undo_ntk

if not lacks('mmengine'):
    from .second_moment import SecondMomentInit

__all__ = [
    'ScaledActivation', 'SecondMomentInit', 'activation_gain', 'keep_second_moment_', 'ntk_parametrize',
    'remove_biases', 'sample_', 'undo_ntk'
]
__getattr__ = explain_missing(__name__, __all__)
