"""Speed, measured on the user's own machine: `make bench` for the whole, `make bench-micro` for its parts."""
