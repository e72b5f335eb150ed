"""Where norms go by a run: `labels` are carried through operators, `trace` runs, `place` decides by `traced`."""
