"""What offload must do: bit for bit the plain optimizer, in bounded device memory, ordered by events alone."""
