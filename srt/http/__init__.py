"""The HTTP face: OpenAI-compatible and native routes, as thin translations of one engine."""
