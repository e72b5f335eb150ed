"""Initialization and parametrization (Su, kexue 8620) of weights and activations that keep the second moment."""
from .moments import ScaledActivation, activation_gain, keep_second_moment_, sample_
from .ntk import ntk_parametrize, remove_biases, undo_ntk
from .second_moment import SecondMomentInit

__all__ = [
    'ScaledActivation', 'SecondMomentInit', 'activation_gain', 'keep_second_moment_', 'ntk_parametrize',
    'remove_biases', 'sample_', 'undo_ntk'
]
