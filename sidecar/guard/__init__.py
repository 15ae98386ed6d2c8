"""Who may come in, and which credentials go on."""
