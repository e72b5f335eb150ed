"""INT8 with the quantizers of the runtimes, and the pictures that they take ranges from."""
from .samples import Samples, samples_of

__all__ = ['Samples', 'samples_of']
