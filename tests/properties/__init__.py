"""Own the state machines: the pure model beside the scripts, and a broker on which any call may fail."""
