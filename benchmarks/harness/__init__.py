"""What the benchmarks share: a private Redis, workers, a backlog, tables; and each measure."""
