"""Initialization and parametrization (Su, kexue 8620): weights and activations that keep the second moment."""
from .biases import remove_biases
from .moments import ScaledActivation, SecondMomentInit, activation_gain, keep_second_moment_, sample_
from .ntk import ntk_parametrize, undo_ntk

__all__ = [
    'ScaledActivation', 'SecondMomentInit', 'activation_gain', 'keep_second_moment_', 'ntk_parametrize',
    'remove_biases', 'sample_', 'undo_ntk'
]
