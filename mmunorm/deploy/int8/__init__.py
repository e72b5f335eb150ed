"""Full-integer LiteRT files: ranges of their tensors."""
