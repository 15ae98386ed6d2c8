"""Continuity: which gateway session a request belongs to."""
