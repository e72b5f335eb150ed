"""How the numbers of the offline norms are computed."""
from .reference import (
    bessel_correction,
    normalize_backward,
    normalize_forward,
    normalize_input_gradient,
    second_moment,
    statistics_dtype,
    variance_and_mean,
)

__all__ = [
    'bessel_correction', 'normalize_backward', 'normalize_forward', 'normalize_input_gradient',
    'second_moment', 'statistics_dtype', 'variance_and_mean'
]
