"""Block plans: what is decided once per block, and what on every forward."""
