"""What mmdet's two-stage detectors do after the neck, rewritten with shapes that do not depend on the image."""
