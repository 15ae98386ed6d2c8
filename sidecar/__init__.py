"""hermes-sidecar: keeps chat conversations together between any frontend and a Hermes gateway."""

__version__ = "0.1.0"
