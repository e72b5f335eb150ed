"""How the numbers of the offline norms are computed."""
from .reference import (
    normalize_backward,
    normalize_forward,
    normalize_input_gradient,
    second_moment,
    statistics_dtype,
)

__all__ = [
    'normalize_backward', 'normalize_forward', 'normalize_input_gradient', 'second_moment',
    'statistics_dtype'
]
