"""Upstream's own test files run through our classes, from a checkout that the caller names; none of their text is here.

``python -m conformance.peers.upstream CHECKOUT`` runs each file twice in processes of their own: as it is, and with our
names in place of upstream's while the test module is imported. What passes for upstream has to pass for ours, or to be
named in the project's ledger beside this file, with the reason.
"""
