"""Drop-in mixture-of-experts layers and block plans for diffusion language models."""

__version__ = "0.1.0"
