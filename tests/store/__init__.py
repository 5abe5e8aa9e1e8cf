"""Own the tests of the scripts, their callers and the connection they are called over."""
