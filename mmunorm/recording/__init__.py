"""What a run's norms did, step by step: measuring it, and the folder that keeps it. No Runner is needed to read it."""
