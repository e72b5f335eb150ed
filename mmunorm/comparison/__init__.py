"""One recipe trained many times, with one thing changed: the runs, how they are trained, their table and image."""
