"""Faults that ``test_export`` must notice."""

from __future__ import annotations

from conformance.harness import mutated, patched

several_devices_one_named = patched(
    "Parameters on several devices are looked at one by one, and only one of the devices is named.",
    mutated("twinproof.offload.driver:check_devices", "len(devices) > 1", "False"),
    kills="OPT-089",
)
