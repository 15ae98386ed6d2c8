"""The sidecar's own answers."""
