"""The only producers of generated text."""
