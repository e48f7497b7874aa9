"""Records that a function of the user's gives, one after the other: users calls it, pipeline makes batches of them."""
