"""Ollama's native API, `/api/*`, as a translation to and from the one inner request."""
