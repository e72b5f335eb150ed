from .digits import CLASSES, make_classification_set, make_detection_set, make_digits
from .made_folder import FolderError

__all__ = [
    'CLASSES', 'FolderError', 'make_classification_set', 'make_detection_set', 'make_digits'
]
