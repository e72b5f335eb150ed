"""DeepNorm (arXiv 2203.00555): PostNorm with a heavier stream and lighter weights, for one stack of N layers."""
from __future__ import annotations

from .base import RESIDUALS, Scale
from .post_norm import PostNorm


@RESIDUALS.register_module()
class DeepNorm(PostNorm):
    """`x' = LN(a x + F(x))` with `a = (2 N)^(1/4)` for N layers.

    The weights of v, out, fc1 and fc2 start as Xavier's times `(8 N)^(-1/4)`, those of q and k as Xavier's.

    Args:
        place (Place): where the connection stands.

    Raises:
        ValueError: the depth of the model is not known.
    """
    needs_depth = True

    def scales(self) -> tuple[Scale, Scale]:
        return (2 * self.depth)**0.25, None

    def gains(self) -> dict[str, float]:
        return dict.fromkeys(('v', 'out', 'fc1', 'fc2'), (8 * self.depth)**-0.25)

    def extra_repr(self) -> str:
        return f'depth={self.depth}'
