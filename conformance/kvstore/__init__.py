"""Requirements, state machine and planted bugs of kvstore: empty until the component lands."""
