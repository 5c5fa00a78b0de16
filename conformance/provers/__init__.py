"""Provers that others can import: devices, disks and ranks that misbehave on purpose, and say what they saw."""
