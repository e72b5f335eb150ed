"""The part of mmdet's two-stage detectors after the neck, with shapes that do not depend on the image."""
