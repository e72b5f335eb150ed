"""Dark versions of images, as a camera sees the same scene with little light."""
import numpy as np

# Of each image one value, from a range.
GAMMA_RANGE = (2., 5.)
GAIN_RANGE = (0.5, 1.)
PHOTON_RANGE = (500., 4000.)  # that a white pixel collects
READ_NOISE_RANGE = (0.002, 0.01)  # standard deviation, of white


def darken(image, rng):
    """The image with gamma and gain, shot noise and read noise, in 8 bits.

    Args:
        image (np.ndarray): uint8, of any shape.
        rng (np.random.Generator): decides everything.

    Returns:
        np.ndarray: uint8 of the same shape.
    """
    gamma, gain, noise = (rng.uniform(*each) for each in (GAMMA_RANGE, GAIN_RANGE, READ_NOISE_RANGE))
    photons = np.exp(rng.uniform(*np.log(PHOTON_RANGE)))
    light = gain * (image / 255.)**gamma
    seen = rng.poisson(light * photons) / photons + rng.normal(scale=noise, size=image.shape)
    return np.rint(np.clip(seen, 0, 1) * 255).astype(np.uint8)
