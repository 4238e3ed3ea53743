"""Replace the MoE blocks of a loaded model in place, and give them back: find them, refuse what cannot be, apply."""
