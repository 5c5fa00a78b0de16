"""Requirements, state machine and planted bugs of pipeline. Empty until the component lands: nothing is collected here."""
