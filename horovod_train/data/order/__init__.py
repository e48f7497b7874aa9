"""Which records each rank reads, and in which order. Arithmetic on numbers of records; only lengths reads any."""
