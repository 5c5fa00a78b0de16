"""Requirements, state machine and planted bugs of checkpoint."""
