"""The tests of the suite itself: comparers, ledger, plugin, kill matrix, fault harness."""
