"""Requirements, state machine and planted bugs of kvstore. Empty until the component lands: nothing is collected here."""
