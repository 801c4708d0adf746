"""How processes that compute different rows come to the same params, and what travels between them."""
