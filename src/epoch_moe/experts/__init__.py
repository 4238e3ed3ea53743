"""Expert weights and the ways to compute routed experts on one device."""
