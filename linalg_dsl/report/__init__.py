"""The HTML page of a compiled recurrence: self-contained, drawn without scripts or network."""
