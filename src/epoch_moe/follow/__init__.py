"""Plans for loops of others, inside the scope in which somebody asked for them."""
