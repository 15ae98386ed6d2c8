"""What the backend can do: asked, observed, declared; said in words."""
