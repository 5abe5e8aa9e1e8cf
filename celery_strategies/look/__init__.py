"""Look at a live system: only reads, in bounded calls, and never needs a worker."""
