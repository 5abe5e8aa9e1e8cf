"""Tests of what is published: levels, keys and weights, as they lie in Redis and as workers see them."""
