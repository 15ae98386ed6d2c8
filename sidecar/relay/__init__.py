"""The data path. Read `handler.py` first: one request from admission to its end."""
