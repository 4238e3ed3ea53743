"""Model classes for transformers, without remote code."""
