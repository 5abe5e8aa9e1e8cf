"""What is broken on purpose: connections, servers, replies and processes."""
