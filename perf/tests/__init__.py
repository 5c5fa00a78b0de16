"""Tests of the benches themselves: harness, gates, counters, figures."""
