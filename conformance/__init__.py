"""The proof: an installable pytest plugin and the requirements of every component."""
