"""Fair share, caps, groups and delays with real workers on a real Redis."""
