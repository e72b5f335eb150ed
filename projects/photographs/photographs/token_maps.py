"""Patch tokens as colours, and how far those of other files are from them."""
from __future__ import annotations

from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont

SIDE = 192  # of a map, in pixels
GAP, TITLE = 6, 26
LARGEST = 0.6  # relative error of a token that is white
OUTLIERS = 0.02  # share of the tokens at each end of a component that are clipped


class Row(NamedTuple):
    """A photograph, uint8 `(H, W, 3)`, its tokens in float, `(P, C)`, and those of files, by title."""
    photograph: np.ndarray
    tokens: np.ndarray
    files: dict[str, np.ndarray]


def component_colours(tokens: np.ndarray, others: list[np.ndarray]) -> list[np.ndarray]:
    """Three principal components of `tokens` as colours from 0 to 1, `(P, 3)`, of these and of `others`."""
    mean = tokens.mean(0)
    axes = np.linalg.svd(tokens - mean, full_matrices=False)[2][:3].T
    low, high = np.quantile((tokens - mean) @ axes, [OUTLIERS, 1 - OUTLIERS], axis=0)
    return [(((each - mean) @ axes - low) / (high - low)).clip(0, 1) for each in (tokens, *others)]


def relative_error(tokens: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """The error of each token relative to the root mean square of all tokens' norms, `(P, )`."""
    return np.linalg.norm(tokens - exact, axis=1) / np.sqrt(np.square(exact).sum(1).mean())


def token_maps(rows: list[Row]) -> Image.Image:
    """One row a photograph: itself, its tokens in float, and for each file its tokens and their errors."""
    titles = ['photograph', 'float']
    for title in rows[0].files:
        titles += [title, f'its error, 0 to {LARGEST:.0%}']
    size = len(titles) * (SIDE + GAP) - GAP, TITLE + len(rows) * (SIDE + GAP) - GAP
    sheet = Image.new('RGB', size, 'white')
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(15)
    for column, title in enumerate(titles):
        draw.text((column * (SIDE + GAP), 3), title, 'black', font)
    for index, row in enumerate(rows):
        colours, *others = component_colours(row.tokens, list(row.files.values()))
        cells = [row.photograph, _squares(colours)]
        for got, colour in zip(row.files.values(), others, strict=True):
            error = (relative_error(got, row.tokens) / LARGEST).clip(0, 1)
            cells += [_squares(colour), _squares(np.repeat(error[:, None], 3, 1))]
        for column, cell in enumerate(cells):
            place = column * (SIDE + GAP), TITLE + index * (SIDE + GAP)
            kind = Image.Resampling.NEAREST if column else Image.Resampling.BICUBIC
            sheet.paste(Image.fromarray(cell).resize((SIDE, SIDE), kind), place)
    return sheet


def _squares(colours: np.ndarray) -> np.ndarray:
    """A map `(P, 3)` from 0 to 1 as a square image in uint8."""
    side = round(len(colours) ** 0.5)
    return (255 * colours).astype(np.uint8).reshape(side, side, 3)
