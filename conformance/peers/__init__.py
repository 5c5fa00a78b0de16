"""Adapters of upstream implementations, each with its ledger of known deviations."""
