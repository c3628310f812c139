"""The work of the model rows."""
