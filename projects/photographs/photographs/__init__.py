"""Data sets from images that Debian ships: cut-out objects on photographs, and unlabelled crops."""
