"""Tests of limits on concurrency."""
