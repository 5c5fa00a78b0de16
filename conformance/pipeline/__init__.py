"""Requirements, state machine and planted bugs of pipeline: empty until the component lands."""
