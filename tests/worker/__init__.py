"""Real workers on a real Redis: one test for each promise, named after its case."""
