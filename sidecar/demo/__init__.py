"""The embedded demo gateway: sessions and streaming, no model."""
