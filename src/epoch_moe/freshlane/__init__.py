"""The lane: fresh pairs packed, computed by their experts, combined and restored."""
