"""The price: paired measurements, counters and gates."""
