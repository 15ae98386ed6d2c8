"""What the sidecar says about itself: logs and metrics."""
