"""Paired measurement, verdicts, counters, gates."""
